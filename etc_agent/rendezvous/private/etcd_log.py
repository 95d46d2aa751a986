"""Why an etcd server ended, from its log: one JSON object per line, and after a panic a Go stack trace."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

_FATAL = ("fatal", "panic", "error")
_FRAME = ("level", "ts", "caller", "msg", "stacktrace")
_LONGEST = 300

# (what etcd says, what to do about it)
_REMEDIES = (
    ("no space left on device", "make room in {folder} (etcd needs about 150 MB), or set TMPDIR to another folder"),
    ("disk quota exceeded", "make room in {folder} (etcd needs about 150 MB), or set TMPDIR to another folder"),
    ("read-only file system", "{folder} cannot be written; set TMPDIR to a folder that can"),
    ("permission denied", "{folder} cannot be written; set TMPDIR to a folder that can"),
    ("file descriptor limit", "raise it with `ulimit -n 1024` or more"),
    ("too many open files", "raise their number with `ulimit -n 1024` or more"),
)


def cause(log: str, folder: Path) -> str:
    """Why etcd ended, in one line, with a remedy where one is known. `folder`: its data folder."""
    told = [_said(entry) for entry in _entries(log) if entry.get("level") in _FATAL]
    panics = [line.removeprefix("panic: ") for line in log.splitlines() if line.startswith("panic: ")]
    lines = [line for line in log.strip().splitlines() if line.strip()]
    found = next(iter([*reversed(told), *panics, *reversed(lines)]), "its log is empty")[:_LONGEST]
    remedy = next((text for sign, text in _REMEDIES if sign in found.lower()), None)
    return f"{found}; {remedy.format(folder=folder)}" if remedy else found


def _entries(log: str) -> Iterator[dict[str, object]]:
    for line in log.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict):
            yield entry


def _said(entry: dict[str, object]) -> str:
    """The message and its values, without the position in etcd's source code."""
    details = [
        str(value) if key == "error" else f"{key} {value}" for key, value in entry.items() if key not in _FRAME
    ]
    message = str(entry.get("msg", ""))
    return f"{message}: {', '.join(details)}" if details else message
