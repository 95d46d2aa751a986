"""grpc, without its core's own lines on standard error: every failure reaches the user as one line of ours.

The core reads GRPC_VERBOSITY while it is imported. It is set for that moment only, since workers inherit our
environment; a user who has set it keeps it.
"""

from __future__ import annotations

import os

_NAME = "GRPC_VERBOSITY"
_is_unset = _NAME not in os.environ
if _is_unset:
    os.environ[_NAME] = "NONE"
try:
    import grpc
finally:
    if _is_unset:
        del os.environ[_NAME]

__all__ = ["grpc"]
