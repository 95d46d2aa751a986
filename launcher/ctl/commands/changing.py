"""scale, drain, cordon, uncordon, pause, resume, stop: the commands that write below ``control/``."""

from __future__ import annotations

from typing import Any

import click

from etc_agent.reconfig.known.records import Reply, Result
from etc_agent.rendezvous.etcd.client import EtcdClient
from etc_agent.rendezvous.keys import JobKeys
from launcher.ctl.exits import CtlError, Exit
from launcher.ctl.job import asking
from launcher.ctl.job.jobs import read_history
from launcher.ctl.options import (
    ANSWER_S,
    WAIT_S,
    SizeType,
    output_option,
    timeout_option,
    wait_option,
    why_option,
    with_job,
)
from launcher.ctl.show.output import Output

_EXIT_CODES = {Result.REFUSED: Exit.FAILED, Result.RESTARTED: Exit.RESTARTED}
"""What `scale` ends with; 0 for every other answer, or none yet."""


class SlotType(click.ParamType):
    """A node, or one slot of it: ``NODE`` or ``NODE/INDEX``."""

    name = "slot"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, int | None]:
        node, slash, index = str(value).partition("/")
        if not node or (slash and not index.isdecimal()):
            raise CtlError(Exit.MISTAKE, f"{value!r} is not a node or a slot; write NODE or NODE/INDEX, like a or a/3")
        return node, int(index) if slash else None


@click.command()
@click.argument("value", type=SizeType())
@with_job
@click.option("--dry-run", is_flag=True, help="Show the plan that the leader would carry out, and change nothing.")
@wait_option
@timeout_option
@output_option
def scale(
    client: EtcdClient, keys: JobKeys, value: str, dry_run: bool, wait: bool, timeout_s: float | None, output: Output
) -> Exit:
    """Ask for another size.

    VALUE is a number of workers (8), nodes=4, a config (PP4TP2DP2) or max.

    Exit code 1: refused. 3: the job has the size, but all workers were restarted on the way, from the last checkpoint.

    \b
    etc-ctl scale 8 --run-id my-job
    etc-ctl scale PP4TP2DP2 --wait --timeout 120
    etc-ctl scale 16 --dry-run
    """
    if dry_run:
        return _dry_run(client, keys, value, timeout_s, output)
    timeout_s = timeout_s if timeout_s is not None else WAIT_S if wait else ANSWER_S

    def say(reply: Reply) -> None:
        output.show(reply, lambda: _line(reply))

    result = asking.scale(client, keys, value, wait=wait, timeout_s=timeout_s, on_reply=say)
    if result is None:
        waiting = f"the job is paused; {value} waits for etc-ctl resume"
        output.show({"request": value, "result": None, "message": waiting}, lambda: waiting)
        return Exit.DONE
    return _EXIT_CODES.get(result, Exit.DONE)


def _dry_run(client: EtcdClient, keys: JobKeys, value: str, timeout_s: float | None, output: Output) -> Exit:
    answer = asking.preview(client, keys, value, WAIT_S if timeout_s is None else timeout_s)
    from launcher.ctl.dry_run import dry_run_screen, predicted

    moved = answer.plan.moved_bytes if answer.plan is not None else None
    prediction = predicted(read_history(client, keys), moved) if moved is not None else None
    output.show({**answer.to_json(), "predicted_stop": prediction}, lambda: dry_run_screen(answer, prediction))
    return Exit.FAILED if answer.result == Result.REFUSED else Exit.DONE


@click.command()
@click.argument("node")
@with_job
@click.option(
    "--deadline", "deadline_s", metavar="SECONDS", type=click.FloatRange(min=0), help="Time to hand over its state."
)
@wait_option
@timeout_option
@output_option
def drain(
    client: EtcdClient, keys: JobKeys, node: str, deadline_s: float | None, wait: bool, timeout_s: float | None,
    output: Output,
) -> None:
    """Ask NODE to hand over its state and leave.

    \b
    etc-ctl drain node7 --run-id my-job --wait
    etc-ctl drain node7 --deadline 60
    """
    timeout_s = WAIT_S if timeout_s is None else timeout_s
    asking.drain(client, keys, node, deadline_s=deadline_s, wait=wait, timeout_s=timeout_s)
    output.show(
        {"node": node, "has_left": wait}, lambda: f"node {node} {'has left' if wait else 'is asked to leave'}"
    )


@click.command()
@click.argument("slot", metavar="NODE[/INDEX]", type=SlotType())
@with_job
@why_option
@output_option
def cordon(client: EtcdClient, keys: JobKeys, slot: tuple[str, int | None], why: str, output: Output) -> None:
    """Keep workers off a node, or off one slot of it.

    A worker that is there stays; to move those of a whole node away, drain it. The mark holds until etc-ctl uncordon,
    also when the job is started again under the same run id.

    \b
    etc-ctl cordon node7 --why 'ECC errors'
    etc-ctl cordon node7/3
    """
    is_here = asking.cordon(client, keys, *slot, why)
    name = _name(slot)
    later = "" if is_here else f"; no node {slot[0]} is here now, it counts when one joins"
    output.show({"cordoned": name, "is_here": is_here}, lambda: f"{name} is cordoned: it takes no new workers{later}")


@click.command()
@click.argument("slot", metavar="NODE[/INDEX]", type=SlotType())
@with_job
@output_option
def uncordon(client: EtcdClient, keys: JobKeys, slot: tuple[str, int | None], output: Output) -> None:
    """Let workers on a node, or a slot, again.

    \b
    etc-ctl uncordon node7
    """
    asking.uncordon(client, keys, *slot)
    output.show({"uncordoned": _name(slot)}, lambda: f"{_name(slot)} may take workers again")


@click.command()
@with_job
@why_option
@output_option
def pause(client: EtcdClient, keys: JobKeys, why: str, output: Output) -> None:
    """Freeze reconfiguration; training goes on.

    \b
    etc-ctl pause --why 'measuring'
    """
    asking.pause(client, keys, why)
    output.show(
        {"run_id": keys.run_id, "paused": True},
        lambda: f"job {keys.run_id} is paused: it keeps its size until etc-ctl resume",
    )


@click.command()
@with_job
@output_option
def resume(client: EtcdClient, keys: JobKeys, output: Output) -> None:
    """End a pause.

    \b
    etc-ctl resume
    """
    was_paused = asking.resume(client, keys)
    said = f"job {keys.run_id} may change its size again" if was_paused else f"job {keys.run_id} was not paused"
    output.show({"run_id": keys.run_id, "paused": False, "was_paused": was_paused}, lambda: said)


@click.command()
@with_job
@why_option
@wait_option
@timeout_option
@output_option
def stop(
    client: EtcdClient, keys: JobKeys, why: str, wait: bool, timeout_s: float | None, output: Output
) -> None:
    """End the job.

    Every worker gets SIGTERM, and every etc-run ends with exit code 143. A worker in a session is ended at once, at
    whatever it does; where the job file has checkpoint.on_stop, all write a checkpoint first.

    \b
    etc-ctl stop --run-id my-job --why 'the budget is spent' --wait
    """
    job = asking.stop(client, keys, why, wait=wait, timeout_s=WAIT_S if timeout_s is None else timeout_s)
    if job is None:
        output.show({"run_id": keys.run_id, "state": None}, lambda: f"job {keys.run_id} is told to stop")
    else:
        output.show({"run_id": keys.run_id, "state": job.state}, lambda: f"job {keys.run_id} has {job.state}")


def _name(slot: tuple[str, int | None]) -> str:
    return slot[0] if slot[1] is None else f"{slot[0]}/{slot[1]}"


def _line(reply: Reply) -> str:
    generation = f" (generation {reply.generation})" if reply.generation else ""
    return f"{reply.request}: {reply.result}{generation}: {reply.message}"
