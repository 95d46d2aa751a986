"""Clipping the gradients of a divided model."""

from __future__ import annotations

from pathlib import Path

from tests.integrations.launched_ranks import launch


def test_the_norm_and_the_clipped_gradients_are_those_of_the_whole_model_for_every_division() -> None:
    assert launch(4, Path(__file__).with_name("clipping_ranks.py")).count("norms agree") == 4
