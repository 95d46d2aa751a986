"""What the manifests of two generations say of state that would be lost."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from etc_agent.errors import EtcError
from etc_agent.integrations.amendments import Amendments
from etc_agent.state.boxes import whole
from etc_agent.state.layout import LogicalTensor, Manifest, Shard
from etc_agent.worker.change.state.amending import check_carried, warn_of_losses
from etc_agent.worker.change.state.holdings import Holdings


def manifest(*names: str) -> Manifest:
    return tuple(Shard(LogicalTensor(name, (2,), "float32", 4), whole((2,))) for name in names)


def carried(rows: list[dict[str, Any]], old: list[Manifest], new: list[Manifest]) -> list[str]:
    held = [{shard.tensor.name for shard in each} for each in old]
    return check_carried(rows, held, {shard.tensor.name for each in new for shard in each})


def said(**amendments: Any) -> dict[str, Any]:
    return {"amendments": amendments, "has_values": False}


def test_optimizer_state_that_the_next_generation_has_no_place_for_is_refused_by_name() -> None:
    old = [manifest("model.a", "optimizer.a.sum", "optimizer.a.late"), ()]
    with pytest.raises(EtcError, match=r"^optimizer\.a\.late would be lost: .* make it in the first step"):
        carried([said(), said()], old, [manifest("model.a", "optimizer.a.sum"), ()])


def test_a_tensor_of_the_model_that_build_does_not_make_again_is_named() -> None:
    old = [manifest("model.a", "model.added", "optimizer.tied.sum", "rng.pp0.dp1.tp0")]
    assert carried([said()], old, [manifest("model.a", "model.new")]) == ["model.added"]


def test_a_parameter_that_the_script_gave_to_the_optimizer_must_be_there_again() -> None:
    row = said(added_groups=[["a", "added"]])
    with pytest.raises(EtcError, match=r"^added would be lost: .* make it in build\(\)"):
        carried([row], [manifest("model.a", "model.added")], [manifest("model.a")])


def test_every_rank_that_holds_a_parameter_must_have_frozen_it() -> None:
    old = [manifest("model.a"), manifest("model.a"), manifest("model.b")]
    frozen = said(trainable={"a": False})
    assert carried([frozen, frozen, said()], old, old) == []
    with pytest.raises(EtcError, match=r"^a was frozen or unfrozen on some of the ranks"):
        carried([frozen, said(), said()], old, old)


def test_the_warning_has_the_numbers_and_the_remedy(caplog: pytest.LogCaptureFixture) -> None:
    numbers = {"model.ema.updates": (0, 412), **{f"model.x{index}": (None, 1) for index in range(6)}}
    with caplog.at_level(logging.WARNING):
        warn_of_losses(3, ["model.added"], Holdings({}, Amendments(), numbers, False), True)
    dropped, changed = (record.getMessage() for record in caplog.records)
    assert dropped.startswith("generation 3 has no model.added")
    assert changed.startswith("model.ema.updates (0 -> 412), model.x0 (none -> 1),")
    assert "and 2 more changed since build()" in changed
    assert "register_buffer" in changed
