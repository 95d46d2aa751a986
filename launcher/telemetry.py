"""What this node's agent is to tell to the outside: --metrics-port, --events, --verdict and --left-exit-code."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Sequence
from pathlib import Path

from etc_agent.agent.settings import TelemetrySettings
from etc_agent.errors import EtcError
from etc_agent.rendezvous.addresses import LOOPBACK, node_name
from launcher.given import Given
from launcher.options import CommandLine, typed_before_script

_ADDRESS = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]:|(?P<host>[^:\[\]]+):)?(?P<port>\d{1,5})")

_LARGEST_EXIT_CODE = 125
"""Shells have their own meanings for larger ones."""


def telemetry(given: Given) -> TelemetrySettings:
    """The settings of them, from the options over the environment over the job file.

    Raises:
        EtcError: one is no port, or no exit code, in one line that names its source.
    """
    section = given.job.telemetry
    text = given.option("metrics_port") or section.metrics_port
    source = given.source("metrics_port", "telemetry.metrics_port")
    metrics = None if text is None else _address(str(text), source)
    address = given.line.args.local_addr
    events, verdict = (
        given.option(name) or getattr(section, name) for name in ("events", "verdict")
    )
    return TelemetrySettings(metrics, _file(events, address), _file(verdict, address), _left_exit_code(given))


def verdict_of(line: CommandLine) -> Path | None:
    """Where the verdict goes when something else in what was given is wrong, maybe the job file."""
    try:
        return telemetry(Given.read(line)).verdict
    except EtcError:
        return _file(line.args.verdict, line.args.local_addr)


def verdict_file(argv: Sequence[str]) -> Path | None:
    """Where the verdict goes when the command line itself cannot be read."""
    return _file(typed_before_script(argv, "verdict") or os.environ.get("ETC_VERDICT"), None)


def _address(text: str, source: str) -> tuple[str, int]:
    match = _ADDRESS.fullmatch(text)
    if match is None or int(match["port"]) > 65535:
        raise EtcError(f"{source}: {text!r} is not a port; write 9400, or 0.0.0.0:9400 for other hosts to reach it")
    return match["v6"] or match["host"] or LOOPBACK, int(match["port"])


def _left_exit_code(given: Given) -> int:
    text = given.option("left_exit_code")
    if text is None:
        return given.job.telemetry.left_exit_code
    if not text.isdecimal() or int(text) > _LARGEST_EXIT_CODE:
        source = given.source("left_exit_code", "")
        raise EtcError(f"{source}: expected an exit code from 0 to {_LARGEST_EXIT_CODE}, got {text!r}")
    return int(text)


def _file(text: str | Path | None, address: str | None) -> Path | None:
    """`text` with this node's name for ``{node}``, so that one command line serves all nodes of a shared folder."""
    if not text:
        return None
    return Path(str(text).replace("{node}", node_name(address or socket.gethostname()))).absolute()
