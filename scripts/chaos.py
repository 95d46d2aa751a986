"""Torment a training job at random and check its account of itself.

    python scripts/chaos.py --seed 1 --faults 30            # agents on loopback addresses
    python scripts/chaos.py --seed 1 --faults 30 --netns    # hosts of their own, whose cables can be pulled (root)

A real job trains over several agents while nodes join and leave, sizes are asked for, workers, agents, whole nodes and
etcd are killed and stopped, and cables are pulled. After each fault, or two at once, the job must be training again in
bounded time. At the end it must have trained on every sample once, with a state that has seen every step once; a death
may have cost the step that was under way, a planned change none; a restart from a checkpoint is wrong wherever the
living held the whole state, and with `--copies` also where copies of it were left; survivors must be the same
processes; nobody may have ended unasked or be left over; and
the workers of two lives may never have trained at the same time. Ends with one JSON object; exit code 1 if anything is
not as it must be.
"""

from __future__ import annotations

import json
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import click
from chaos.cluster import GLOBAL_BATCH, Cluster, State
from chaos.faults import FAULTS, Fault, Injected, Nature, draw
from chaos.lineage import Excuses, examine

from etc_agent.control.causes import ErrorKind
from etc_agent.reconfig.known.records import Outcome, Result
from etc_agent.rendezvous.etcd.errors import EtcdError
from tests.scenarios.network import Network

CALM_S = 2.0
"""For how long nothing must change before the job counts as settled; longer than the agents wait for one more node."""


_GOOD_REASONS = "left before it was ready"
"""Why a generation may be withdrawn although no fault was a loss: a change of plans."""


class GaveUp(Exception):
    """The job is not training again; the message says why."""


@dataclass(slots=True)
class Torment:
    """One run. `wrong`: what was not as it must be, one line each."""

    cluster: Cluster
    rng: random.Random
    recover_s: float
    by_kind: Counter[str] = field(default_factory=Counter)
    unexpected_exits: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    recoveries_s: list[float] = field(default_factory=list)
    fenced: list[tuple[float, float]] = field(default_factory=list)
    request: int = 0

    def start(self, num_nodes: int) -> None:
        for number in range(num_nodes):
            self.cluster.join(number)
        self.settle()

    def strike(self, number: int, kinds: tuple[str, ...], overlap: float) -> int:
        """One fault, or two at once. Returns how many."""
        before, begun = self.cluster.state(), time.time()
        struck: list[tuple[Fault, Injected]] = [draw(self.cluster, self.rng, kinds)]
        self._note(number, *struck[0])
        if self.rng.random() < overlap:
            time.sleep(self.rng.uniform(0, 2))
            self._note_exits()
            struck.append(draw(self.cluster, self.rng, kinds))
            self._note(number + 1, *struck[1])
        for _, injected in struck:
            time.sleep(injected.hold_s)
            injected.undo()
        begin = time.monotonic()
        after = self.settle()
        self.recoveries_s.append(time.monotonic() - begin)
        natures = {fault.nature for fault, _ in struck}
        if any(fault.takes_etcd_away for fault, _ in struck) and any(fault.silences_node for fault, _ in struck):
            self.fenced.append((begun, time.time()))
        what = " + ".join(fault.kind for fault, _ in struck)
        self._judge(number, what, natures, before, after)
        assert after.committed is not None
        _say(
            f"     training again after {self.recoveries_s[-1]:.1f} s: generation {after.committed.id}, "
            f"{after.committed.config} on {', '.join(after.committed.nodes)}"
        )
        return len(struck)

    def settle(self) -> State:
        """Wait until the job trains and nothing changes any more.

        Raises:
            GaveUp: it does not in `recover_s`, or has ended.
        """
        deadline, calm_since, seen = time.monotonic() + self.recover_s, time.time(), None
        while True:
            self._note_exits()
            if not self.cluster.nodes:
                raise GaveUp("no agent is left")
            try:
                state = self.cluster.state()
            except EtcdError as error:
                why: str | None = str(error)
            else:
                if state.current.outcome is not Outcome.RUNNING:
                    raise GaveUp(f"the job {state.current.outcome}: {state.current.why}")
                present = (state.current, state.nodes)
                if present != seen:
                    seen, calm_since = present, time.time()
                why = self._not_settled(state, calm_since)
                if why is None:
                    return state
            if time.monotonic() > deadline:
                raise GaveUp(f"not training again after {self.recover_s:.0f} s: {why}")
            time.sleep(0.2)

    def finish(self) -> None:
        """Let the job come to its end; every agent must exit 0.

        Raises:
            GaveUp: it does not end.
        """
        last = max(line.step for line in self.cluster.account.read()) + 20
        target = self.cluster.folder / "last"
        target.with_suffix(".new").write_text(str(last))
        target.with_suffix(".new").rename(target)
        for node in self.cluster.nodes:
            node.may_exit = (0,)
        deadline = time.monotonic() + self.recover_s
        while self.cluster.nodes:
            self._note_exits()
            if time.monotonic() > deadline:
                raise GaveUp(f"{', '.join(node.address for node in self.cluster.nodes)} did not end with the job")
            time.sleep(0.2)

    def _note(self, number: int, fault: Fault, injected: Injected) -> None:
        self.by_kind[fault.kind] += 1
        self.request = injected.request or self.request
        held = f" for {injected.hold_s:.1f} s" if injected.hold_s else ""
        _say(f"{number:4d} {fault.kind}: {injected.what}{held}")

    def _note_exits(self) -> None:
        for node, code in self.cluster.ended():
            if code == 1 and not node.has_joined and "etcd does not answer" in node.run.output:
                _say(f"     {node.address} could not join while etcd was away")
            elif code not in node.may_exit:
                expected = f"{node.may_exit[0]} was expected" if node.may_exit else "nobody asked it to end"
                self.unexpected_exits.append(f"the agent on {node.address} ended with {code}; {expected}")
                _say(f"     {self.unexpected_exits[-1]}")

    def _not_settled(self, state: State, calm_since: float) -> str | None:
        committed, current = state.committed, state.current
        staying = [node for node in self.cluster.nodes if not node.may_exit]
        if len(staying) < len(self.cluster.nodes):
            return "a node has yet to leave"
        if len(state.nodes) != len(staying):
            return f"{len(state.nodes)} nodes are registered, {len(staying)} agents run"
        if committed is None or current.proposed:
            return f"generation {current.proposed or 1} is on its way"
        if not {*committed.nodes} <= {record.name for record in state.nodes}:
            return f"generation {committed.id} has a node that is gone"
        if state.current.handled_scale < self.request:
            return "a request is not answered"
        if state.reply and state.reply.revision == self.request and state.reply.result is Result.ACCEPTED:
            return "an accepted request is not met"
        if current.pending_scale and any(each.kind is not ErrorKind.MODEL for each in current.given_up):
            return "a request is to be tried again"
        late = [line for line in self.cluster.account.read() if line.time > calm_since + CALM_S]
        steps = Counter(line.rank for line in late if line.generation == committed.id)
        if any(steps[rank] < 2 for rank in range(committed.config.num_ranks)):
            return f"not every rank of generation {committed.id} trains"
        return None

    def _judge(self, number: int, what: str, natures: set[Nature], before: State, after: State) -> None:
        """Whether what followed may follow from it."""
        assert before.committed is not None
        assert after.committed is not None
        new = [generation for id_, generation in after.generations.items() if id_ > before.committed.id]
        if natures == {Nature.HARMLESS} and before.committed.id != after.committed.id:
            self.wrong.append(f"fault {number} ({what}) led to generation {after.committed.id}: {new[-1].reason}")
        if Nature.LOSS not in natures and any(generation.is_fresh for generation in new):
            reasons = [generation.reason for generation in new if generation.is_fresh]
            self.wrong.append(f"fault {number} ({what}) led to a restart: {reasons[0]}")
        for id_ in after.withdrawn.keys() - before.withdrawn.keys():
            _say(f"     generation {id_} was withdrawn: {after.withdrawn[id_]}")
            if Nature.LOSS not in natures and not re.search(_GOOD_REASONS, after.withdrawn[id_]):
                self.wrong.append(f"fault {number} ({what}): generation {id_} was withdrawn: {after.withdrawn[id_]}")


def _say(line: str) -> None:
    click.echo(f"{time.strftime('%H:%M:%S')} {line}", err=True)


def torment(run: Torment, num_faults: int, minutes: float, kinds: tuple[str, ...], overlap: float) -> int:
    """Start the job, strike `num_faults` times or for `minutes`, and let it end. Returns the number of faults.

    Raises:
        GaveUp: the job stopped training.
    """
    run.start(max(1, run.cluster.num_nodes // 2))
    done, deadline = 0, time.monotonic() + minutes * 60
    while done < num_faults and time.monotonic() < deadline:
        done += run.strike(done + 1, kinds, overlap)
    run.finish()
    return done


def report(run: Torment, seed: int, gave_up: str, copies_every: int) -> dict[str, object]:
    """The JSON object of the run."""
    cluster = run.cluster
    orphans = cluster.orphans()
    excuses = Excuses(cluster.deaths, tuple(run.fenced), copies_every)
    found = examine(cluster.account.read(), cluster.generations, GLOBAL_BATCH, excuses)
    wrong = run.wrong + found.wrong + [f"orphan {pid}: {command}" for pid, command in orphans.items()]
    return {
        "faults": run.by_kind.total(),
        "generations": max(cluster.generations, default=0),
        "max_steps_lost": found.steps_lost_planned,
        "unexpected_exits": len(run.unexpected_exits),
        "orphans": len(orphans),
        "seed": seed,
        "by_kind": dict(sorted(run.by_kind.items())),
        "steps": found.num_steps,
        "withdrawn": len(cluster.withdrawn),
        "workers_killed": len(cluster.deaths),
        "restarts_from_checkpoint": max(found.lives - 1, 0),
        "needless_restarts": found.needless_restarts,
        "steps_redone": found.steps_redone,
        "steps_redone_max": found.redone_max,
        "steps_gone_back": found.steps_gone_back,
        "steps_gone_back_max": found.gone_back_max,
        "steps_repeated_by_restarts": found.steps_repeated,
        "slowest_recovery_s": round(max(run.recoveries_s, default=0.0), 1),
        "wrong": ([gave_up] if gave_up else []) + run.unexpected_exits + wrong,
    }


def _save_output(cluster: Cluster) -> None:
    for index, node in enumerate(cluster.gone + cluster.nodes):
        (cluster.folder / f"agent-{index}-{node.address}.log").write_text(node.run.output)


@click.command(help=(__doc__ or "").partition("\n")[0])
@click.option("--seed", type=int, default=1, show_default=True)
@click.option("--faults", type=click.IntRange(1), default=30, show_default=True)
@click.option("--minutes", type=click.FloatRange(0), default=1e6, help="Stop after so long, whatever is left.")
@click.option("--nodes", type=click.IntRange(2, 20), default=4, show_default=True, help="At most.")
@click.option("--slots", type=click.IntRange(1), default=1, show_default=True, help="Per node.")
@click.option("--netns", is_flag=True, help="Nodes in network namespaces; adds faults of the network. Needs root.")
@click.option("--only", "kinds", multiple=True, type=click.Choice([fault.kind for fault in FAULTS]))
@click.option("--overlap", type=click.FloatRange(0, 1), default=0.2, show_default=True, help="How often two at once.")
@click.option("--recover", type=click.FloatRange(1), default=120.0, show_default=True, help="Seconds to train again.")
@click.option("--pause", type=click.FloatRange(0), default=0.2, show_default=True, help="Seconds between steps.")
@click.option("--copies", type=click.IntRange(0), default=0, help="Copy state to other nodes every so many steps.")
@click.option("--folder", type=click.Path(path_type=Path), help="Keep logs here; by default they go with the run.")
def main(
    seed: int, faults: int, minutes: float, nodes: int, slots: int, netns: bool, kinds: tuple[str, ...], overlap: float,
    recover: float, pause: float, copies: int, folder: Path | None,
) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))  # everything is taken down on the way out
    if netns and (why := Network.why_not()):
        raise click.UsageError(f"--netns: {why}")
    if kinds and not netns and set(kinds) <= {"cut", "blink"}:
        raise click.UsageError(f"--only {' '.join(kinds)}: cables can be pulled with --netns alone")
    with tempfile.TemporaryDirectory(prefix="chaos-") as temporary:
        place = folder or Path(temporary)
        place.mkdir(parents=True, exist_ok=True)
        if any(place.glob("steps-*.jsonl")):
            raise click.UsageError(f"--folder: {place} holds an earlier run; choose another")
        with Cluster(
            place.absolute(), nodes, slots, on_network=netns, pause_s=pause, copies_every=copies
        ) as cluster:
            run, gave_up = Torment(cluster, random.Random(seed), recover), ""
            try:
                torment(run, faults, minutes, kinds, overlap)
            except GaveUp as error:
                gave_up = str(error)
                _say(f"     {gave_up}")
            _save_output(cluster)
            found = report(run, seed, gave_up, copies)
    for line in found["wrong"]:  # type: ignore[attr-defined]
        _say(f"WRONG: {line}")
    click.echo(json.dumps(found))
    sys.exit(1 if found["wrong"] else 0)


if __name__ == "__main__":
    main()
