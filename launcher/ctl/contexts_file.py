"""The schema of the contexts file."""

from __future__ import annotations

from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from launcher.ctl.contexts import Context, Contexts
from launcher.ctl.exits import CtlError, Exit
from launcher.mistakes import mistake

_OPTIONS = {
    "prefix": "etcd_prefix", "user": "etcd_user", "timeout_s": "etcd_timeout", "run_id": "run_id",
    "password_file": "etcd_password_file", "ca_file": "etcd_ca_file", "cert_file": "etcd_cert_file",
    "key_file": "etcd_key_file",
}
"""Field -> the parameter of etc-ctl's option that it stands for."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Context(_Section):
    endpoints: list[str] = Field(min_length=1)
    prefix: str | None = None
    run_id: str | None = None
    user: str | None = None
    password_file: Path | None = None
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    timeout_s: float | None = Field(default=None, gt=0)

    def values(self, folder: Path) -> dict[str, object]:
        """By etc-ctl's parameters; paths start at `folder`, and may begin with ``~``."""
        given = {name: value for name, value in self if value is not None}
        found: dict[str, object] = {"etcd_endpoints": ",".join(given.pop("endpoints"))}
        for name, value in given.items():
            found[_OPTIONS[name]] = folder / value.expanduser() if isinstance(value, Path) else value
        return found


class _File(_Section):
    current: str | None = None
    contexts: dict[str, _Context] = Field(default_factory=dict)


def parse(path: Path, text: str) -> Contexts:
    """The contexts in `text`, which was read from `path`.

    Raises:
        CtlError: it is wrong; one line.
    """
    try:
        file = _File.model_validate(yaml.safe_load(text) or {})
    except yaml.YAMLError as error:
        raise CtlError(Exit.MISTAKE, f"{path}: not YAML: {' '.join(str(error).split())}") from None
    except ValidationError as error:
        # A field that is missing is often there under a mistyped name, which says more.
        first = min(error.errors(), key=lambda each: each["type"] == "missing")
        raise CtlError(Exit.MISTAKE, f"{path}: {mistake(dict(first), _File)}") from None
    known = {name: Context(name, each.values(path.parent)) for name, each in file.contexts.items()}
    return Contexts(path, file.current, known)
