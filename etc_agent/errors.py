"""The errors that etc-run shows to people: one clear line each."""

from __future__ import annotations


class EtcError(RuntimeError):
    """Something the user can act on. The message says what was given, what was expected and what to do."""
