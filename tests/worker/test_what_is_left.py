"""After every kind of change each rank holds one generation alone: no state or world of another is referred to."""

from __future__ import annotations

from pathlib import Path

from mini_agent import NODE, MiniAgent

from etc_agent.control.messages import Armed, Prepared, Refused
from etc_agent.parallel.topology import Slot

ONE = {
    "TrainState": 1, "World": 1, "LiveGeneration": 1, "PreparedGeneration": 0, "KeepingMigration": 0,
    "ReleasingMigration": 0,
}
"""What a worker holds between two changes."""


def slot(index: int) -> Slot:
    return Slot(NODE, index)


def see_one_generation(agent: MiniAgent, after: str) -> None:
    """Wait until every rank of the present generation has ended a step with that generation alone in its memory."""
    generation = agent.generation
    assert generation is not None
    begun = agent.steps()[-1]["step"]

    def held() -> dict[int, dict[str, int]]:
        lines = [line for line in agent.steps() if line["step"] > begun and line["generation"] == generation.id]
        return {line["rank"]: line["living"] for line in lines}

    ranks = range(generation.config.num_ranks)
    agent.wait_for(lambda: held() == dict.fromkeys(ranks, ONE), f"one generation after {after}")


def see_all_prepared(agent: MiniAgent, generation: int, everyone: list[Slot]) -> None:
    answers = [agent.hear(each, Prepared, Refused, generation=generation) for each in everyone]
    assert all(isinstance(answer, Prepared) for answer in answers), answers


def test_no_rank_keeps_another_generation_after_any_kind_of_change(tmp_path: Path) -> None:
    fault = {"counts": True, "forget_scheduler": [5, 1]}
    with MiniAgent(tmp_path, pause_s=0.02, verify=False, timeout_s=30.0, fault=fault) as agent:
        agent.start("PP2")
        agent.wait_for(lambda: bool(agent.steps()), "the first step")
        see_one_generation(agent, "the start")
        agent.describe(slot(0), "TP2DP2")
        see_one_generation(agent, "a description")

        agent.change("TP2DP2")
        see_one_generation(agent, "a change to more workers")
        agent.change("PP4")
        see_one_generation(agent, "a change of config")
        agent.change("DP2")
        see_one_generation(agent, "a change to fewer workers")

        generation, everyone = agent.prepare("TP2")
        assert generation.id == 5
        see_all_prepared(agent, generation.id, everyone)
        for each in everyone:
            agent.send(each, Armed(generation.id))
        for each in everyone:
            agent.hear(each, Refused, generation=generation.id)
        see_one_generation(agent, "a migration that was voted down")

        generation, everyone = agent.prepare("TP5")
        for each in everyone:
            agent.hear(each, Refused, generation=generation.id)
        agent.withdraw(generation, everyone)
        see_one_generation(agent, "a config that the model refuses")

        generation, everyone = agent.prepare("PP3")
        see_all_prepared(agent, generation.id, everyone)
        agent.withdraw(generation, everyone)
        see_one_generation(agent, "a change that was prepared and withdrawn")

        generation, everyone = agent.prepare("PP3")
        see_all_prepared(agent, generation.id, everyone)
        agent.send(slot(0), Armed(generation.id))
        agent.withdraw(generation, everyone)
        see_one_generation(agent, "a change that was withdrawn when one worker was armed")

        agent.describe(slot(1), "TP2DP2")
        agent.change("TP2")
        see_one_generation(agent, "a description and a change")
        assert {tuple(line["walkers"]) for line in agent.steps()} == {()}, "the main thread alone walks live modules"
        assert "whose values end with this one" not in agent.logs(), "views are made again"
