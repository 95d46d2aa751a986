"""Launchers under test, each in a process of its own."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.forkserver import context

MODULES = {"torchrun": "torch.distributed.run", "etc-run": "launcher.run"}


class Executed:
    """A launcher started as a person would start it.

    `stdout`, `stderr`: files that it writes to, maybe one and the same. `prefix`: a command that runs its arguments in
    its own place.
    """

    def __init__(
        self, launcher: str, arguments: Sequence[str], environment: Mapping[str, str], cwd: Path, stdout: Path,
        stderr: Path, prefix: Sequence[str] = (),
    ) -> None:
        with stdout.open("ab") as out, stderr.open("ab") as err:
            self._process = subprocess.Popen(
                [*prefix, sys.executable, "-m", MODULES[launcher], *arguments], cwd=cwd, env=environment, stdout=out,
                stderr=err, start_new_session=True,
            )
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """The exit code, once it has ended; minus the signal where one ended it."""
        return self._process.poll()

    def wait(self, timeout_s: float) -> int | None:
        """The same, waited for; None where it has not ended in time."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        self._process.kill()


class Forked:
    """A launcher's main in a process that is forked when torch has been loaded: most of the time of a start is that."""

    def __init__(
        self, launcher: str, arguments: Sequence[str], environment: Mapping[str, str], cwd: Path, stdout: Path,
        stderr: Path,
    ) -> None:
        self._process = context.Process(
            target=_main, args=(MODULES[launcher], list(arguments), dict(environment), cwd, stdout, stderr)
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout_s: float) -> int | None:
        self._process.join(timeout_s)
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


def _main(
    module: str, arguments: list[str], environment: dict[str, str], cwd: Path, stdout: Path, stderr: Path
) -> None:
    for file, path in ((1, stdout), (2, stderr)):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(opened, file)
        os.close(opened)
    os.setsid()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv, tempfile.tempdir = [module, *arguments], None
    sys.exit(importlib.import_module(module).main(arguments))
