"""The same training as planned changes alone: the judge of a job whose workers have died.

The bits of a step follow from the parallel config of every step before it, and from nothing else. So a job that lost
workers is compared with one in which nobody died and that made its changes of config by plan, at the same steps.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from tests.worker.mini_agent import MiniAgent

Line = dict[str, Any]
COMPARED = ("generation", "config", "digest", "forwards", "ids", "loss")
TIMEOUT_S = 300.0
"""Longer than a machine takes that runs much else: a slow replay is no finding."""
OF_A_PLACE = ("stream", "own_steps")
"""What only the worker at one place of the grid has."""


@dataclass(frozen=True, slots=True)
class Leg:
    """One generation's part of a job: it ran the steps from `first` on."""

    generation: int
    config: str
    first: int


def lines_of(folder: Path) -> list[Line]:
    """Every line that the workers of a injected job have written, by step and rank; broken ones of the dead are left
    out."""
    lines = []
    for path in folder.glob("steps-*.jsonl"):
        lines += [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    return sorted(lines, key=lambda line: (line["step"], line["generation"], line["rank"]))


def legs_of(lines: Iterable[Line]) -> list[Leg]:
    """The generations that trained, in order."""
    applied = [line for line in lines if "retried" not in line]
    ordered = sorted(applied, key=lambda line: (line["generation"], line["step"]))
    firsts = [next(part) for _, part in groupby(ordered, key=lambda line: line["generation"])]
    return [Leg(line["generation"], line["config"], line["step"]) for line in firsts]


def replay(folder: Path, legs: list[Leg], last: int, fault: dict[str, Any]) -> list[Line]:
    """The lines of an undisturbed job that goes through `legs` up to step `last`."""
    folder.mkdir()
    gates = [leg.first - 1 for leg in legs[1:]]
    fault = {**fault, "gates": gates, "abort_timeout_s": 1.0}
    with MiniAgent(
        folder, num_steps=last + 1, pause_s=0.0, verify=False, job="injected_job", fault=fault, timeout_s=TIMEOUT_S
    ) as agent:
        for number, leg in enumerate(legs):
            agent.next_id = leg.generation
            if number:
                agent.wait_for((folder / f"gate-{leg.first - 1}").exists, f"step {leg.first - 1}")
                agent.change(leg.config)
            else:
                agent.start(leg.config)
        assert set(agent.finish().values()) == {0}
    return lines_of(folder)


def differences(job: list[Line], undisturbed: list[Line], begun_anew: set[tuple[int, tuple[int, ...]]]) -> list[str]:
    """What `job` did otherwise than the undisturbed one, one line each.

    `begun_anew`: (generation, place) of the ranks whose random stream and extras of their own began anew, since the
    only worker that had them was lost.
    """
    expected = {(line["step"], line["rank"]): line for line in undisturbed}
    found = []
    for line in job:
        key = (line["step"], line["rank"])
        if "retried" in line:
            continue
        if key not in expected:
            found.append(f"step {key[0]}: rank {key[1]} should not have run it")
            continue
        is_anew = (line["generation"], tuple(line["place"])) in begun_anew
        for what in COMPARED + (() if is_anew else OF_A_PLACE):
            if line[what] != expected[key][what]:
                found.append(f"step {key[0]}, rank {key[1]}: {what} is {line[what]}, not {expected[key][what]}")
    return found
