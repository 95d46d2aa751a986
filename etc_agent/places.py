"""Folders of our own: only this user can enter them, and a Unix socket in them has a path that the kernel takes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from etc_agent.errors import EtcError

MAX_SOCKET_PATH_BYTES = 107
"""Of the 108 bytes in `struct sockaddr_un`, one ends the string."""
_LONGEST_NAME_BYTES = len("/control.sock")
_RANDOM_BYTES = 8


def private_folder(prefix: str) -> Path:
    """A new folder below TMPDIR (or /tmp) that only this user can enter.

    Raises:
        EtcError: there is no place for it.
    """
    try:
        return Path(tempfile.mkdtemp(prefix=prefix, dir=os.path.abspath(tempfile.gettempdir())))
    except OSError as error:
        raise EtcError(f"no temporary folder: {error}; set TMPDIR to a folder that can be written") from None


def socket_folder(prefix: str) -> Path:
    """As `private_folder`, and short enough for sockets: where TMPDIR is too long, in another temporary folder.

    Raises:
        EtcError: there is no place for it.
    """
    for parent in _temporary_folders():
        path_bytes = len(os.fsencode(parent)) + 1 + len(prefix) + _RANDOM_BYTES + _LONGEST_NAME_BYTES
        if path_bytes <= MAX_SOCKET_PATH_BYTES and os.path.isdir(parent):
            try:
                return Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
            except OSError:
                continue
    raise EtcError(
        f"no folder for Unix sockets: {', '.join(_temporary_folders())} cannot be written, or the path is longer than "
        f"a socket's may be ({MAX_SOCKET_PATH_BYTES} bytes); set TMPDIR to a short one that can be written"
    )


def _temporary_folders() -> Iterator[str]:
    """Where sockets may lie, the best first."""
    try:
        yield os.path.abspath(tempfile.gettempdir())  # "." stays relative there
    except OSError:  # none that it knows can be written
        pass
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        yield runtime
    yield from ("/tmp", "/var/tmp", "/dev/shm")
