"""wait: block until a job is in a state, has a config or reaches a step. It does not write."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click

from etc_agent.parallel.config import ParallelConfig
from etc_agent.rendezvous.etcd.client import EtcdClient
from etc_agent.rendezvous.keys import JobKeys
from launcher.ctl.exits import CtlError, Exit
from launcher.ctl.job.asking import following
from launcher.ctl.job.jobs import Job, State, job_of
from launcher.ctl.options import WAIT_S, output_option, with_job
from launcher.ctl.show.output import Output

_STATES = (*(state.value for state in State), "ended")


@dataclass(frozen=True, slots=True)
class Goal:
    """What is waited for: `text`, and whether a job `meets` it."""

    text: str
    meets: Callable[[Job], bool]


class GoalType(click.ParamType):
    """``state=running`` (or ended), ``config=PP4TP2DP2``, ``step=1000``."""

    name = "goal"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Goal:
        kind, _, text = str(value).partition("=")
        try:
            match kind:
                case "state":
                    if text not in _STATES:
                        raise ValueError(f"{text!r} is no state; write one of {', '.join(_STATES)}")
                    return Goal(str(value), lambda job: text == job.state or (text == "ended" and job.state.has_ended))
                case "config":
                    config = ParallelConfig.parse(text)
                    return Goal(str(value), lambda job: _runs_as(job, config))
                case "step":
                    if not text.isdecimal():
                        raise ValueError(f"{text!r} is no step; write step=1000")
                    return Goal(str(value), lambda job: (job.status.get("step") or 0) >= int(text))
            raise ValueError(f"{value!r}: write state=STATE, config=PP4TP2DP2 or step=1000")
        except ValueError as error:
            raise CtlError(Exit.MISTAKE, f"--for: {error}") from None


def _runs_as(job: Job, config: ParallelConfig) -> bool:
    return job.committed is not None and not job.committed.is_held and job.committed.config == config


@click.command()
@with_job
@click.option("--for", "goal", required=True, type=GoalType(), metavar="WHAT",
              help=f"state=S (S: {', '.join(_STATES)}), config=PP4TP2DP2, or step=1000.")
@click.option("--timeout", "timeout_s", metavar="SECONDS", type=click.FloatRange(min=0), default=WAIT_S,
              show_default=True, help="How long to wait.")
@output_option
def wait(client: EtcdClient, keys: JobKeys, goal: Goal, timeout_s: float, output: Output) -> None:
    """Wait for a state, a config or a step.

    Exit code 5: not within --timeout. 6: the job ended, and it is not what was waited for.

    \b
    etc-ctl wait --for state=running --run-id my-job
    etc-ctl wait --for config=PP4TP2DP2 --timeout 60
    etc-ctl wait --for step=1000 && etc-ctl scale 16
    etc-ctl wait --for state=ended --timeout 86400
    """
    began = time.monotonic()
    with following(client, keys) as mirror:

        def is_decided(now: Any) -> bool:
            job = job_of(now, keys)
            return goal.meets(job) or job.state.has_ended

        is_in_time = mirror.wait_for(is_decided, timeout_s)
        job = job_of(mirror.snapshot(), keys)
    if not is_in_time:
        raise CtlError(Exit.NO_ANSWER, f"not {goal.text} within {timeout_s:g} s (--timeout); the job is {job.state}")
    if not goal.meets(job):
        because = f": {job.current.why}" if job.current.why else ""
        raise CtlError(Exit.JOB_ENDED, f"job {keys.run_id} has {job.state}{because}; it is not {goal.text}")
    waited_s = round(time.monotonic() - began, 3)
    found = {"run_id": keys.run_id, "for": goal.text, "state": job.state, "waited_s": waited_s}
    output.show(found, lambda: f"{goal.text}: so it is, after {waited_s:.1f} s")
