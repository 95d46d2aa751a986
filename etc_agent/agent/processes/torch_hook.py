"""How the code that numbers the process groups of ``env://`` (`group_numbers`) gets into our workers, and only there.

torch calls the entry points of the group ``torch.backends`` that it finds on `sys.path` when it is imported. An entry
point of the installed package would run in every process of the environment that imports torch, whoever started it. So
it is in a folder of its own, which only the PYTHONPATH of a worker contains.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

_VARIABLE = "PYTHONPATH"
FOLDER = Path(__file__).resolve().parent / "worker_path"
"""Contains the entry point and its module, and nothing that could hide a module of the user."""


def search_path(environment: Mapping[str, str]) -> dict[str, str]:
    """The PYTHONPATH of a worker that otherwise has `environment`: our folder comes last."""
    given = environment.get(_VARIABLE)
    if given and str(FOLDER) in given.split(os.pathsep):
        return {_VARIABLE: given}
    return {_VARIABLE: f"{given}{os.pathsep}{FOLDER}" if given else str(FOLDER)}


def install_here() -> None:
    """Do in this worker, which imported torch before it became one, what torch does in others when it is imported."""
    sys.path.append(str(FOLDER))
    import_module("etc_run_worker").install()
