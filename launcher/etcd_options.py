"""Where etcd is, and the credentials for it, from what the user gave; shared by etc-run and etc-ctl."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from etc_agent.errors import EtcError

DEFAULT_PORT = 2379
_SOCKET = re.compile(r"unix:///[^,\s]+")
_ENDPOINT = re.compile(r"(?:(https?)://)?(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+)(?::([0-9]{1,5}))?/?")


def parse_endpoints(texts: Iterable[str], where: str) -> tuple[str, ...]:
    """etcd servers as ``host:port``, ``https://host:port``, or ``unix:///path`` for one of this host. Each text may
    hold several, with commas between.

    The port is etcd's own where none is given. `where` names the place they were given, for the error.

    Raises:
        EtcError: one is not of that form, or there is none.
    """
    found = []
    for text in (part.strip() for whole in texts for part in whole.split(",")):
        if _SOCKET.fullmatch(text):
            found.append(text)
            continue
        match = _ENDPOINT.fullmatch(text)
        port = int(match[3] or DEFAULT_PORT) if match else 0
        if match is None or not 0 < port < 65536:
            raise EtcError(f"{where}: {text!r} is not an etcd server; write HOST:PORT or https://HOST:PORT")
        scheme = "https://" if match[1] == "https" else ""
        found.append(f"{scheme}{match[2]}:{port}")
    if not found:
        raise EtcError(f"{where}: no etcd server given; write HOST:PORT or https://HOST:PORT")
    if len({endpoint.startswith("https://") for endpoint in found}) > 1:
        raise EtcError(f"{where}: some servers are https and some are not; use one kind")
    return tuple(dict.fromkeys(found))


def read_password(path: Path, where: str) -> str:
    """The password in a file, without the newline at its end.

    Raises:
        EtcError: the file cannot be read, or is empty.
    """
    try:
        password = path.read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise EtcError(f"{where}: {path} cannot be read: {reason}") from None
    if not password:
        raise EtcError(f"{where}: {path} is empty; it should hold the etcd password")
    return password


def check_readable(path: Path, where: str) -> Path:
    """`path`, absolute, once it has been opened.

    Raises:
        EtcError: it cannot be read.
    """
    try:
        path.open("rb").close()
    except OSError as error:
        raise EtcError(f"{where}: {path} cannot be read: {error.strerror}") from None
    return path.absolute()
