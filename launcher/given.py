"""The sources of a setting: command line, environment, job file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etc_agent.errors import EtcError
from etc_agent.torch_private.elastic import parse_rendezvous_config
from launcher.job import Job, load_job
from launcher.options import CommandLine


@dataclass(frozen=True, slots=True)
class Given:
    """The three sources of a setting. `file`: the job file's name as the user wrote it, empty without one."""

    line: CommandLine
    job: Job
    file: str

    @classmethod
    def read(cls, line: CommandLine) -> Given:
        """Load the job file that the command line or the environment names, if any."""
        file = line.args.config
        return cls(line, load_job(Path(file)) if file else Job(), file or "")

    def option(self, name: str) -> Any:
        """The value of an option that was typed or set in the environment, else None."""
        return getattr(self.line.args, name) if self.line.given(name) else None

    def source(self, name: str, field: str) -> str:
        """Where the setting with this option name and job file field came from, for messages."""
        return self.line.given(name) or (f"{self.file}: {field}" if self.file else f"--{name.replace('_', '-')}")

    @property
    def folder(self) -> Path:
        return Path(self.file).parent.absolute()

    @property
    def rdzv_conf(self) -> dict[str, str]:
        """What ``--rdzv-conf`` says, by key.

        Raises:
            EtcError: it is not of the form key=value,key=value.
        """
        try:
            return parse_rendezvous_config(self.line.args.rdzv_conf)
        except ValueError as error:
            raise EtcError(f"--rdzv-conf: {error}") from None
