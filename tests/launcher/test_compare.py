"""etc-run behaves as torchrun does: both run the same command lines, and every difference is a listed one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.launcher.compare import compare, documented, table
from tests.launcher.comparison.cases import CASES, DIFFERENCES


@pytest.mark.long
def test_every_difference_from_torchrun_is_listed_and_the_documented_table_is_true() -> None:
    comparisons = compare(CASES)
    unlisted = [line for comparison in comparisons for line in comparison.unlisted()]
    assert not unlisted, "\n\n".join(unlisted)
    assert table(comparisons) == documented(), "run tests/launcher/compare.py --write"


def test_every_reason_is_used_or_about_all_rows() -> None:
    used = {key for case in CASES for key in case.differs.values()}
    assert used | {"log-folders", "console"} == set(DIFFERENCES)


def test_every_option_of_torchrun_is_compared_or_spoken_of() -> None:
    """A new torch may bring options that nobody has looked at."""
    from torch.distributed.run import get_args_parser

    typed = {word for case in CASES for word in case.options}
    spoken = (Path(__file__).resolve().parents[2] / "docs" / "torchrun.md").read_text()
    spoken += (Path(__file__).resolve().parents[2] / "docs" / "launcher.md").read_text()
    for action in get_args_parser()._actions:
        if action.option_strings and action.dest != "help":
            named = any(re.search(re.escape(option) + r"\b", spoken) for option in action.option_strings)
            assert typed & set(action.option_strings) or named, f"{action.option_strings} of torch {torch.__version__}"
