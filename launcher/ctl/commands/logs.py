"""logs: a worker's output, read from the folder that its node has published. It does not write."""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path
from typing import Any, BinaryIO

import click

from etc_agent.parallel.generation import Generation
from etc_agent.parallel.topology import Slot
from etc_agent.rendezvous.etcd.client import EtcdClient
from etc_agent.rendezvous.keys import JobKeys
from launcher.ctl.exits import CtlError, Exit
from launcher.ctl.job.jobs import Job, read_generations, read_job
from launcher.ctl.options import output_option, with_job
from launcher.ctl.show.output import Output

_LOOK_AGAIN_S = 0.2
_STREAMS = {"stdout": ("stdout",), "stderr": ("stderr",), "both": ("stdout", "stderr")}


class WorkerType(click.ParamType):
    """``NODE/RANK``: a node and the virtual rank of a worker there."""

    name = "worker"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, int]:
        node, _, rank = str(value).rpartition("/")
        if not node or not rank.isdecimal():
            raise CtlError(Exit.MISTAKE, f"{value!r} is not a worker; write NODE/RANK, like a/3")
        return node, int(rank)


@click.command()
@click.argument("worker", metavar="NODE/RANK", type=WorkerType())
@with_job
@click.option("--generation", type=click.IntRange(min=1), metavar="G", help="Of this generation, not the present one.")
@click.option("--stream", type=click.Choice(list(_STREAMS)), default="both", show_default=True)
@click.option("--lines", "-n", "num_lines", type=click.IntRange(min=0), default=100, show_default=True,
              help="How many lines from the end; 0 for all.")
@click.option("--follow", "-f", is_flag=True, help="Go on with what is written, until Ctrl-C.")
@output_option
def logs(
    client: EtcdClient, keys: JobKeys, worker: tuple[str, int], generation: int | None, stream: str, num_lines: int,
    follow: bool, output: Output,
) -> None:
    """The output of the worker with virtual rank RANK on NODE.

    The files are read where they lie: on the node itself, or anywhere with the same file system. Elsewhere the path is
    told. A worker that stays over a change goes on writing to the same files.

    \b
    etc-ctl logs node7/12
    etc-ctl logs node7/12 --stream stderr --follow
    etc-ctl logs node7/12 --generation 3 -n 0
    """
    job = read_job(client, keys)
    folder = _folder(job, read_generations(client, keys), worker, generation)
    files = [path for name in _STREAMS[stream] if (path := folder / f"{name}.log").exists()]
    if not files:
        raise CtlError(
            Exit.NOT_FOUND,
            f"no {stream} log in {folder}; the worker writes to the console of its etc-run, unless that is started "
            "with --redirects 3 or --tee 3",
        )
    if output.form == "json":
        for path in files:
            output.show({"file": str(path), "lines": _last_lines(path, num_lines)}, str)
        return
    for path in files:
        if len(files) > 1:
            click.echo(f"==> {path} <==")
        for line in _last_lines(path, num_lines):
            click.echo(line)
    if follow:
        _follow([path.open("rb") for path in files])


def _folder(job: Job, generations: list[Generation], worker: tuple[str, int], generation: int | None) -> Path:
    """The folder of a worker's files: that of the generation for which its process was started.

    Raises:
        CtlError: there is no such worker, or its node's folder is not on this host.
    """
    by_id = {each.id: each for each in generations}
    wanted = job.current.committed if generation is None else generation
    chosen = by_id.get(wanted)
    if chosen is None:
        known = f"there are {min(by_id)} to {max(by_id)}" if by_id else "there is none yet"
        raise CtlError(Exit.NOT_FOUND, f"no generation {wanted} in job {job.run_id}; {known}")
    node, rank = worker
    if rank >= len(chosen.placement) or chosen.placement[rank].node != node:
        here = [index for index, slot in enumerate(chosen.placement) if slot.node == node]
        ranks = f"its ranks are {', '.join(map(str, here))}" if here else "it has none"
        raise CtlError(Exit.NOT_FOUND, f"no rank {rank} on node {node} in generation {chosen.id}; {ranks}")
    slot = chosen.placement[rank]
    started = _started_for(chosen, slot, by_id)
    said = {ack.logs for (_, name), ack in job.records.acks.items() if name == node and ack.logs}
    if not said:
        raise CtlError(Exit.NOT_FOUND, f"node {node} has told of no logs; see --log-dir and --redirects of etc-run")
    root = Path(said.pop())
    folder = root / f"generation_{started.id}/{node}/{started.placement.index(slot)}"
    if not root.is_dir():
        raise CtlError(Exit.NOT_FOUND, f"{folder} is on node {node}, and not on this host")
    return folder


def _started_for(generation: Generation, slot: Slot, by_id: dict[int, Generation]) -> Generation:
    """The generation for which the process that is in `slot` in `generation` was started."""
    while (previous := by_id.get(generation.previous)) is not None:
        if slot not in previous.placement or slot in generation.lost:
            break
        generation = previous
    return generation


def _last_lines(path: Path, number: int) -> list[str]:
    with path.open("r", encoding="utf-8", errors="replace") as file:
        return [line.rstrip("\n") for line in deque(file, number or None)]


def _follow(files: list[BinaryIO]) -> None:
    """Print what is added to the files, from their present ends on."""
    for file in files:
        file.seek(0, 2)
    while True:
        added = [file.read() for file in files]
        for text in filter(None, added):
            click.echo(text, nl=False)
        if not any(added):
            time.sleep(_LOOK_AGAIN_S)
