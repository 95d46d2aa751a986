"""What `list` and `status` say of a job, as plain values: the same for text and for JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from etc_agent.parallel.topology import Slot
from etc_agent.reconfig.known.records import NodeRecord
from etc_agent.reconfig.loss.survival import by_grid
from launcher.ctl.job.explaining import explain
from launcher.ctl.job.jobs import Job
from launcher.ctl.show.output import plain


def list_row(job: Job) -> dict[str, Any]:
    """One line of `list`."""
    return {
        "run_id": job.run_id,
        "state": job.state,
        "paused": job.pause is not None,
        "config": job.status.get("config"),
        "workers": job.status.get("workers"),
        "step": job.status.get("step"),
        "num_steps": job.status.get("num_steps"),
        "rate_steps_per_s": None if job.state.has_ended else job.status.get("rate_steps_per_s"),
        "nodes": len(job.nodes),
        "started": job.rules.get("started"),
    }


def status_of(job: Job) -> dict[str, Any]:
    """The answer of `status`."""
    current, committed = job.current, job.committed
    ranks = job.ranks_by_slot()
    return {
        **list_row(job),
        "config": str(committed.config) if committed else None,
        "workers": committed.config.num_ranks if committed else 0,
        "generation": current.committed,
        "explanation": explain(job),
        "outcome": {"exit_code": current.exit_code, "why": current.why} if job.state.has_ended else None,
        "changing_to": _changing_to(job),
        "recovering_from": plain(current.loss) if current.loss is not None else None,
        "wanted": current.wanted or "max",
        "last_request": plain(job.reply) if job.reply is not None else None,
        "pause": plain(job.pause) if job.pause is not None else None,
        "pause_mistake": job.pause_mistake or None,
        "last_change": plain(job.last_change) if job.last_change is not None else None,
        "restarts": current.restarts,
        "max_restarts": job.max_restarts,
        "losses": current.losses,
        "survives": survives(job),
        "goodput": _goodput(job),
        "time": job.status.get("time"),
        "leader": job.records.leader or None,
        "nodes": [_node(job, node, ranks) for node in job.nodes],
        "cordons": [{"name": str(cordon), **cordon.order.to_json()} for cordon in job.records.cordons],
        "given_up": [plain(each) for each in current.given_up],
    }


def _changing_to(job: Job) -> dict[str, Any] | None:
    proposed = job.proposed
    if proposed is None:
        return None
    nodes = job.participants(proposed)
    return {
        "generation": proposed.id,
        "config": str(proposed.config),
        "reason": proposed.reason,
        "phase": job.current.phase,
        "nodes": len(nodes),
        "nodes_ready": sum(bool(job.ack(proposed, node).prepared) for node in nodes),
    }


def _node(job: Job, node: NodeRecord, ranks: Mapping[Slot, int]) -> dict[str, Any]:
    slots = [Slot(node.name, index) for index in range(node.num_slots)]
    ack = job.ack(job.committed, node.name) if job.committed else None
    return {
        "name": node.name,
        "address": node.address,
        "state": "draining" if job.is_draining(node) else str(node.state),
        "slots": node.num_slots,
        "ranks": sorted(ranks[slot] for slot in slots if slot in ranks),
        "idle_slots": [slot.index for slot in slots if slot not in ranks and not job.is_cordoned(slot)],
        "warm_spares": list(node.spares),
        "cordoned": [cordon.index for cordon in job.records.cordons if cordon.node == node.name],
        "failure": plain(ack.failure) if ack is not None and ack.failure is not None else None,
    }


def _goodput(job: Job) -> dict[str, float] | None:
    """Seconds trained, and seconds of life up to the leader's last word."""
    known, told_at = job.records.goodput, job.status.get("time")
    if known is None or told_at is None:
        return None
    return {"trained_s": known.trained_s, "life_s": round(known.life_s(float(told_at)), 3)}


def survives(job: Job) -> dict[str, Any] | None:
    """What the job can lose now without losing state: what the leader says, if it does; else what the grid shows. None
    where there is nothing to say."""
    if job.state.has_ended or job.committed is None:
        return None
    known = job.status.get("survives") if job.status.get("generation") == job.committed.id else None
    return dict(known) if known else by_grid(job.committed).to_json()
