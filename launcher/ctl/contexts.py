"""Contexts: named etcds, with credentials and maybe a job, in one small YAML file.

    current: lab
    contexts:
      lab: {endpoints: ["etcd0:2379", "etcd1:2379"]}
      prod: {endpoints: ["https://etcd:2379"], ca_file: ca.pem, user: ada, password_file: ~/.etcd, run_id: big}
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.ctl.exits import CtlError, Exit

VARIABLE = "ETC_CONTEXTS"


@dataclass(frozen=True, slots=True)
class Context:
    """`values`: option of etc-ctl, by its parameter name -> value. `name`: "" for no context."""

    name: str
    values: Mapping[str, Any]


NO_CONTEXT = Context("", {})


@dataclass(frozen=True, slots=True)
class Contexts:
    """Every context of the file at `path`. `current`: the one that counts where none is chosen, or None."""

    path: Path
    current: str | None
    by_name: Mapping[str, Context]

    def choose(self, name: str | None) -> Context:
        """The context `name`, else the current one.

        Raises:
            CtlError: there is none of that name.
        """
        chosen = name or self.current
        if chosen is None:
            return NO_CONTEXT
        if chosen not in self.by_name:
            known = ", ".join(self.by_name) or "none"
            where = "--context" if name else f"{self.path}: current"
            raise CtlError(Exit.MISTAKE, f"{where}: no context {chosen} in {self.path}; there are {known}")
        return self.by_name[chosen]


def contexts_path() -> Path:
    """The file: ETC_CONTEXTS, or ``etc-run/contexts.yaml`` in the user's folder for settings."""
    if named := os.environ.get(VARIABLE):
        return Path(named)
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "etc-run" / "contexts.yaml"


def read_contexts() -> Contexts:
    """The contexts in the file; none where there is no file.

    Raises:
        CtlError: the file cannot be read, or is wrong; one line that names the field.
    """
    path = contexts_path()
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        if os.environ.get(VARIABLE):
            raise CtlError(Exit.MISTAKE, f"{VARIABLE}: {path} does not exist") from None
        return Contexts(path, None, {})
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise CtlError(Exit.MISTAKE, f"{path} cannot be read: {reason}") from None
    from launcher.ctl.contexts_file import parse  # loads pydantic, which not every command needs

    return parse(path, text)
