"""What another user of this host can do: real processes of a user without rights, which only root can make."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

NOBODY = 65534
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


def error_of_another_user(act: Callable[[], object]) -> int:
    """The errno of the OSError that `act` raises where another user does it; 0 where nothing stops him."""
    pid = os.fork()
    if pid == 0:
        try:
            os.chdir("/")
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            act()
        except OSError as error:
            os._exit(error.errno or 255)
        except BaseException:
            os._exit(255)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
