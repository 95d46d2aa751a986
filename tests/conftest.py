"""What holds for every test."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Where it is set, Python writes a line in pieces, and those of workers that share one output fall between each other.
# Users may set it, as under torchrun; the tests read whole lines of programs that launchers do not start themselves.
os.environ.pop("PYTHONUNBUFFERED", None)
# Hundreds of processes would compile this package, each for itself.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# How long an example takes says nothing: test files run beside each other.
settings.register_profile("untimed", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

LONGEST_FIRST = (
    "worker/test_every_pair.py", "scenarios/test_one_node.py", "scenarios", "launcher/test_compare.py", "integrations",
    "migration", "rendezvous", "worker", "launcher",
)
"""Files that run for minutes, and rooms whose tests start processes. With these begun first, nothing long is left for
one process alone at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files in the order of `LONGEST_FIRST`; tests within a file stay in theirs."""
    items.sort(key=lambda item: place(item.path.relative_to(Path(__file__).parent)))


def place(path: Path) -> int:
    """How many in `LONGEST_FIRST` come before this file."""
    known = (place for place, prefix in enumerate(LONGEST_FIRST) if path.is_relative_to(prefix))
    return next(known, len(LONGEST_FIRST))
