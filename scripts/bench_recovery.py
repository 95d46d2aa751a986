"""How soon a job trains again after a death without notice, and what being ready for one costs.

Real etcd, real agents, the demo model. Each measure can be chosen with `--only`:

* recovery: SIGKILL of one of four workers (PP2TP1DP2), another one each time: seconds to the end of the next completed
  step.
* restart: the same under torchrun, which restarts all workers, with a PyTorch distributed checkpoint on tmpfs of every
  step.
* dp: data parallelism alone (PP1TP1DP4), with a model so small that the time is the machinery's, and a global batch
  that three workers divide too.
* torchft: the same model and loss under torchft; needs `--torchft`, the interpreter of an environment that has it.
* dp-demo: as dp, with the demo model.
* spare: five slots for four workers, so that a warm spare waits: seconds until a step at full size is completed.
* agent: two nodes with two slots each; SIGKILL of the agent of one: seconds to the end of the other's next step. The
  lease has its default length.
* vote: the share of a step that a vote takes: the median of a bare all-reduce of its size against that of a step.
* peer: a job of two nodes that copies unreplicated state to the other node every ten steps, against one that does not.
  Both are there all the time and run by turns of twenty steps, whose means are compared.

A sample in which workers were restarted, or a survivor's process was replaced, counts as failed. The last line is one
JSON object.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterable
from contextlib import ExitStack
from itertools import cycle
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import click
import torch
from bench_reconfigure import _etc_run, _torchrun
from recovery.job import DEMO, TINY, Lost, Place, RecoveringJob, RecoveryError
from recovery.replicas import Replicas
from recovery.restarting import restarts
from rich.console import Console
from rich.table import Table

GRID, PURE = "PP2TP1DP2", "PP1TP1DP4"
DP_PLACES = [(0, 0, 0), (0, 3, 0), (0, 1, 0), (0, 2, 0)]
MEASURES = ("recovery", "restart", "dp", "torchft", "dp-demo", "spare", "agent", "vote", "peer")
_EVERY = 10
"""Steps between two copy sets."""
Result = dict[str, Any]


class Bench:
    """Runs measures with one model and shows what they find. `rounds`: losses of each kind."""

    def __init__(
        self, folder: Path, model: list[str], rounds: int, steady_steps: int, torchft: Path | None
    ) -> None:
        self._folder = folder
        self._model = model
        self._demo = [DEMO, *model, "--global-batch=32"]
        self._torchft = torchft
        self._rounds = rounds
        self._steady_steps = steady_steps
        self._redone = 0
        self.shown = Console(highlight=False, width=160)
        self.failed = 0

    def recovery(self) -> Result:
        places = [(0, 0, 0), (1, 1, 0), (1, 0, 0), (0, 1, 0)]
        lost = self._losses("recovery", GRID, places, self._demo)
        times = [each.next_step_s for each in lost]
        return {"recovery_s": median(times), "recovery_worst_s": most(times), "steps_redone_max": self._redone}

    def restart(self) -> Result:
        times = restarts(GRID, [*self._model, "--global-batch=32"], self._rounds)
        self.shown.print("restart: " + ", ".join(f"{seconds:.2f}" for seconds in times) + " s")
        return {"restart_s": median(times)}

    def dp(self) -> Result:
        times = [each.next_step_s for each in self._losses("dp", PURE, DP_PLACES, [TINY])]
        return {"recovery_dp_s": median(times), "recovery_dp_worst_s": most(times), "steps_redone_max": self._redone}

    def torchft(self) -> Result:
        if self._torchft is None:
            return {}
        with Replicas(self._torchft, self._folder / "torchft") as replicas:
            times = [replicas.lose(place[1]) for place, _ in zip(cycle(DP_PLACES), range(self._rounds))]
        self.shown.print("torchft: " + ", ".join(f"{seconds:.2f}" for seconds in times) + " s")
        return {"torchft_dp_s": median(times), "torchft_dp_worst_s": most(times)}

    def dp_demo(self) -> Result:
        lost = self._losses("dp-demo", PURE, DP_PLACES, [DEMO, *self._model, "--global-batch=48"])
        times = [each.next_step_s for each in lost]
        return {"recovery_dp_demo_s": median(times), "recovery_dp_demo_worst_s": most(times)}

    def spare(self) -> Result:
        places = [(1, 0, 0), (0, 1, 0), (0, 0, 0), (1, 1, 0)]
        lost = self._losses("spare", GRID, places, self._demo, num_slots=5)
        times = [each.full_size_s for each in lost]
        return {"spare_full_size_s": median(times), "spare_full_size_worst_s": most(times)}

    def agent(self) -> Result:
        """Each loss needs a job of its own: an agent that was killed does not come back."""
        lost = []
        for number in range(max(2, self._rounds // 2)):
            folder = self._folder / f"agent-{number}"
            with RecoveringJob(folder, PURE, self._demo, num_nodes=2, num_slots=2) as job:
                job.settle()
                # That of the leader and the store, then the other.
                is_leader = [job.leader().startswith(f"127.0.0.{index + 2}") for index in range(2)]
                victim = is_leader.index(number % 2 == 0)
                lost.append(self._note(job.kill_agent(job.agents[victim])))
        self._show("agent", lost)
        times = [each.next_step_s for each in lost if not each.wrong]
        return {"agent_loss_s": median(times), "agent_loss_worst_s": most(times)}

    def vote(self) -> Result:
        log = self._folder / "vote.jsonl"
        _etc_run(4, "train_gpt.py", *map(str, self._demo[1:]), f"--steps={self._steady_steps}", f"--step-log={log}")
        step_s = statistics.median(durations(log))
        output = _torchrun(4, "bench_reconfigure.py", "--all-reduce", "2000")
        vote_s = float(output.split()[-1])
        return {"vote_percent": round(100 * vote_s / step_s, 2), "vote_ms": ms(vote_s), "step_ms": ms(step_s)}

    def peer(self) -> Result:
        """The machine's speed drifts, so the turns are short."""
        times: dict[str, list[float]] = {"none": [], "peer": []}
        with ExitStack() as stack:
            jobs = {}
            for scheme in times:
                job = jobs[scheme] = stack.enter_context(
                    RecoveringJob(
                        self._folder / scheme, GRID, self._demo, num_nodes=2, num_slots=2,
                        job_file={"redundancy": {"scheme": scheme, "every": _EVERY}},
                    )
                )
                job.settle()
                job.step_s(2 * _EVERY)
                job.stop_workers()
            for number in range(2 * self._rounds):
                for scheme in ("none", "peer") if number % 2 else ("peer", "none"):
                    jobs[scheme].let_workers_go_on()
                    times[scheme].append(jobs[scheme].step_s(2 * _EVERY))
                    jobs[scheme].stop_workers()
                self.shown.print("peer: " + ", ".join(f"{name} {ms(values[-1])} ms" for name, values in times.items()))
        none_s, peer_s = (statistics.mean(times[scheme]) for scheme in ("none", "peer"))
        costs = [100 * (peer / none - 1) for none, peer in zip(times["none"], times["peer"], strict=True)]
        return {
            "peer_percent": round(100 * (peer_s / none_s - 1), 2),
            "peer_percent_median_of_turns": round(statistics.median(costs), 2),
            "peer_percent_error": round(statistics.stdev(costs) / len(costs) ** 0.5, 2),
        }

    # ---- what they share -------------------------------------------------------------------------------------------

    def _losses(
        self, name: str, config: str, places: list[Place], command: list[str | Path], num_slots: int = 4
    ) -> list[Lost]:
        """As many good samples as there are rounds, if the job lives as long."""
        lost: list[Lost] = []
        with RecoveringJob(self._folder / name, config, command, num_slots=num_slots) as job:
            try:
                for number in range(self._rounds):
                    lost.append(self._note(job.kill_worker(places[number % len(places)])))
            except RecoveryError as error:
                self.failed += 1
                self.shown.print(f"{name}: {error}", style="red", markup=False)
        self._show(name, lost)
        good = [each for each in lost if not each.wrong]
        self._redone = max([self._redone, *(each.steps_redone for each in good)])
        return good

    def _note(self, lost: Lost) -> Lost:
        self.shown.print(
            f"{lost.what}: next step after {lost.next_step_s:.2f} s, full size after {lost.full_size_s:.2f} s"
            + (f"; FAILED: {lost.wrong}" if lost.wrong else ""), markup=False,
        )
        self.failed += bool(lost.wrong)
        return lost

    def _show(self, name: str, lost: Iterable[Lost]) -> None:
        """The median moment of each phase, in the order in which they come."""
        good = [each for each in lost if not each.wrong]
        table = Table("after the signal", "ms", title=f"{name}, medians of {len(good)}")
        names = dict.fromkeys(key for each in good for key in each.moments)
        for key in names:
            at = statistics.median(each.moments[key] for each in good if key in each.moments)
            table.add_row(key, f"{1e3 * at:.0f}")
        phases = dict.fromkeys(key for each in good for key in each.phases_ms)
        for key in phases:
            values = [each.phases_ms[key] for each in good if key in each.phases_ms]
            table.add_row(f"  of it, {key}", f"{statistics.median(values):.0f}")
        self.shown.print(table)


def median(times: list[float]) -> float | None:
    return round(statistics.median(times), 3) if times else None


def most(times: list[float]) -> float | None:
    return round(max(times), 3) if times else None


def ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)


def durations(log: Path) -> list[float]:
    """Seconds of the later steps of a run."""
    steps = [json.loads(line)["step_s"] for line in log.read_text().splitlines()]
    return steps[len(steps) // 4 :]


@click.command(help=__doc__)
@click.option("--only", "chosen", multiple=True, type=click.Choice(MEASURES), help="Only this; may be repeated.")
@click.option("--rounds", default=7, show_default=True, help="Losses of each kind.")
@click.option("--layers", default=4, show_default=True)
@click.option("--hidden", default=128, show_default=True)
@click.option("--quick", is_flag=True, help="A small model and two losses of each kind, to see that all works.")
@click.option("--torchft", type=click.Path(path_type=Path), help="Interpreter of an environment that has torchft.")
@click.option("--folder", type=click.Path(path_type=Path), help="Keep logs here; by default they go with the run.")
def main(
    chosen: tuple[str, ...], rounds: int, layers: int, hidden: int, quick: bool, torchft: Path | None,
    folder: Path | None,
) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))  # everything is taken down on the way out
    if quick:
        rounds, layers, hidden = 2, 2, 32
    model = [f"--layers={layers}", f"--hidden={hidden}", "--heads=4"]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="etc-run-bench-") as name:
        place = folder or Path(name)
        place.mkdir(parents=True, exist_ok=True)
        bench, result = Bench(place.absolute(), model, rounds, 40 if quick else 150, torchft), {}
        for measure in chosen or MEASURES:
            result |= getattr(bench, measure.replace("-", "_"))()
    if result.get("restart_s") and result.get("recovery_s"):
        result["restart_over_recovery"] = round(result["restart_s"] / result["recovery_s"], 1)
    result |= {"rounds": rounds, "failed_samples": bench.failed}
    print(json.dumps(result))
    sys.exit(1 if bench.failed else 0)


if __name__ == "__main__":
    main()
