"""Keeps a private etcd from outliving its owner. Run as a script: guard.py FOLDER COMMAND...

Starts COMMAND and prints its process id. Ends when it ends, with its exit code. When standard input closes, which is
what happens when the owner dies in whatever way, it kills COMMAND and removes FOLDER. COMMAND dies with the guard, too:
a parent-death signal follows the thread that forked, and the guard has only one. It imports nothing of ours, so that it
is small and quick to start.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys

_GRACE_MS = 3000
_PR_SET_PDEATHSIG = 1


def main(folder: str, command: list[str]) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    libc, guard = ctypes.CDLL(None), os.getpid()

    def prepare() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard:  # it died before that took effect
            os._exit(1)

    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr.fileno(), preexec_fn=prepare)
    with contextlib.suppress(BrokenPipeError):  # the owner has gone already, as standard input will tell
        os.write(sys.stdout.fileno(), b"%d\n" % child.pid)
    poll = select.poll()
    owner, ended = sys.stdin.fileno(), os.pidfd_open(child.pid)
    poll.register(owner, select.POLLIN | select.POLLHUP)
    poll.register(ended, select.POLLIN)
    if ended not in {descriptor for descriptor, _ in poll.poll()}:
        poll.unregister(owner)
        child.terminate()
        if not poll.poll(_GRACE_MS):
            child.kill()
        child.wait()
        shutil.rmtree(folder, ignore_errors=True)
    return child.wait()


if __name__ == "__main__":
    code = main(sys.argv[1], sys.argv[2:])
    sys.exit(code if code >= 0 else 128 - code)
