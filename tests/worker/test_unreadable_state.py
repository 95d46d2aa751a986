"""A script's `state_dict` that raises in the midst of a change."""

from __future__ import annotations

from pathlib import Path

import pytest
from mini_agent import MiniAgent

from etc_agent.control.messages import Armed, Hello, Prepared, Refused


@pytest.mark.parametrize(("extra", "rank"), [pytest.param("notes", 0, marks=pytest.mark.long), ("own", 1)])
@pytest.mark.parametrize("migration", ["keep", "release"])
def test_a_state_dict_that_raises_votes_the_change_down_with_its_reason(
    extra: str, rank: int, migration: str, tmp_path: Path
) -> None:
    with MiniAgent(tmp_path, pause_s=0.02, fault={"unreadable": [extra, rank], "migration": migration}) as agent:
        agent.start("PP2")
        (tmp_path / "unreadable").touch()
        generation, everyone = agent.prepare("PP3")
        for each in everyone:
            agent.hear(each, Prepared, generation=generation.id)
            agent.send(each, Armed(generation.id))
        reasons = {agent.hear(each, Refused, generation=generation.id).error for each in everyone}
        assert reasons == {f"LookupError: the state of {extra} is not at hand"}
        (tmp_path / "unreadable").unlink()
        joiner = agent.workers.pop(everyone[-1])
        agent.gone.append(joiner)
        joiner.process.join(60)
        assert joiner.process.exitcode == 0, "it has nothing to lose"
        agent.change("PP3")
        agent.first_steps()
        assert {agent.hear(each, Hello).generation for each in agent.workers} == {1, 3}
