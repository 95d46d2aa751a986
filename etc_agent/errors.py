"""The errors that etc-run shows to people: one line each."""

from __future__ import annotations

LONGEST_LINE = 2000
"""Characters of one error that are passed on: it goes through etcd, which refuses values above 1.5 MB."""


class EtcError(RuntimeError):
    """Something the user can act on. The message says what was given, what was expected and what to do."""


class PeerLostError(EtcError):
    """Another worker, or the store at which workers meet, went away or did not answer in time."""


class ConfigRefusedError(ValueError):
    """The model cannot have a parallel config; the message is the model's own reason."""


class RelayedError(EtcError):
    """Another worker's error, as that worker has told it. `kind`: of the other's error, `control.causes.ErrorKind`."""

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.kind = kind


def one_line(error: BaseException) -> str:
    """An error as one line for people: the type is named where the message alone may not speak for itself."""
    text = shortened(str(error))
    return text if isinstance(error, EtcError | ValueError) and text else named(error)


def named(error: BaseException) -> str:
    """An error as one line with its type, for a message that says what raised it."""
    text = shortened(str(error))
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def shortened(text: str) -> str:
    """`text` as one line of at most `LONGEST_LINE` characters."""
    line = " ".join(text[: 2 * LONGEST_LINE].split())
    return line if len(line) <= LONGEST_LINE else line[: LONGEST_LINE - 3] + "..."
