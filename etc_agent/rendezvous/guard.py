"""Keeps a private etcd from outliving its owner. Run as a script: guard.py FOLDER COMMAND...

Starts COMMAND and prints its process id. Ends when it ends, with its exit code. When standard input closes, which is
what happens when the owner dies in whatever way, it kills COMMAND and removes FOLDER. It imports nothing of ours, so
that it is small and quick to start.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys

_GRACE_MS = 3000


def main(folder: str, command: list[str]) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=sys.stderr.fileno(), restore_signals=True, preexec_fn=_default_signals
    )
    print(child.pid, flush=True)
    poll = select.poll()
    owner, ended = sys.stdin.fileno(), os.pidfd_open(child.pid)
    poll.register(owner, select.POLLIN | select.POLLHUP)
    poll.register(ended, select.POLLIN)
    ready = {descriptor for descriptor, _ in poll.poll()}
    if ended not in ready:
        poll.unregister(owner)
        child.terminate()
        if not poll.poll(_GRACE_MS):
            child.kill()
        child.wait()
        shutil.rmtree(folder, ignore_errors=True)
    return child.wait()


def _default_signals() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


if __name__ == "__main__":
    code = main(sys.argv[1], sys.argv[2:])
    sys.exit(code if code >= 0 else 128 - code)
