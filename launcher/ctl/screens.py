"""What `list` and `status` show to people, from the values in `accounts`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from etc_agent.reconfig.records import History
from launcher.ctl.tables import grid, plain_table, size, stopped_training
from launcher.ctl.times import ago, when

_BAD = ("failed", "gone")


def list_screen(rows: Sequence[Mapping[str, Any]], now: float) -> RenderableType:
    """One row a job."""
    table = plain_table("run id", "state", "config", "workers>", "step>", "steps/s>", "nodes>", "started")
    for row in rows:
        table.add_row(
            escape(row["run_id"]), _state(row), row["config"] or "", _shown(row["workers"]), _step(row),
            _rate(row["rate_steps_per_s"]), str(row["nodes"]), ago(row["started"] or 0.0, now),
        )
    return table


def status_screen(status: Mapping[str, Any], now: float) -> RenderableType:
    """One screen: what the job does, what is wanted of it, what it has, node by node."""
    facts = grid()
    for name, value in _facts(status, now).items():
        if value:
            facts.add_row(f"[bold]{name}", value)
    return Group(facts, "", _nodes_table(status))


def _facts(status: Mapping[str, Any], now: float) -> dict[str, str]:
    started = status["started"] or 0.0
    used, most = status["restarts"], status["max_restarts"]
    return {
        "job": f"{escape(status['run_id'])}: {_state(status)}",
        "now": escape(status["explanation"]),
        "config": f"{status['config']} on {status['workers']} workers, generation {status['generation']}"
        if status["config"] else "",
        "step": ", ".join(filter(None, (_step(status), _per_s(status["rate_steps_per_s"])))),
        "started": f"{when(started)} ({ago(started, now)})" if started else "",
        "changing to": _changing(status["changing_to"]),
        "recovering": escape(status["recovering_from"]["why"]) if status["recovering_from"] else "",
        "wanted": escape(status["wanted"]),
        "last request": _request(status["last_request"]),
        "paused": _order(status["pause"], now) if status["pause"] is not None else "",
        "mistake": escape(status["pause_mistake"] or ""),
        "last change": _last_change(status["last_change"], now),
        "restarts": f"{used} of {most} used" if most is not None else str(used),
        "handled in place": f"{status['losses']} losses" if status["losses"] else "",
        "can lose": _survives(status["survives"]),
        "leader": escape(status["leader"] or "none"),
        "cordoned": "; ".join(f"{escape(each['name'])} {_order(each, now)}".strip() for each in status["cordons"]),
        "given up": "; ".join(escape(f"{each['config']}: {each['why']}") for each in status["given_up"]),
    }


def _nodes_table(status: Mapping[str, Any]) -> Table:
    table = plain_table("node", "state", "address", "slots>", "ranks", "idle", "cordoned")
    for node in status["nodes"]:
        failure = node["failure"]
        state = f"[red]failed: {escape(failure['error'])}" if failure else node["state"]
        cordoned = ["all" if index is None else str(index) for index in node["cordoned"]]
        table.add_row(
            escape(node["name"]), state, escape(node["address"]), str(node["slots"]), numbers(node["ranks"]),
            numbers(node["idle_slots"]), " ".join(cordoned),
        )
    return table


def numbers(found: Sequence[int]) -> str:
    """Numbers in order, runs of them shortened: ``0-3 8``."""
    parts: list[list[int]] = []
    for number in sorted(found):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return " ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def _state(row: Mapping[str, Any]) -> str:
    state = f"[red]{row['state']}[/red]" if row["state"] in _BAD else str(row["state"])
    return f"{state}, paused" if row["paused"] else state


def _step(row: Mapping[str, Any]) -> str:
    if row["step"] is None:
        return ""
    return f"{row['step']} of {row['num_steps']}" if row["num_steps"] else str(row["step"])


def _rate(rate: float | None) -> str:
    return "" if rate is None else f"{rate:.3g}"


def _per_s(rate: float | None) -> str:
    return "" if rate is None else f"{rate:.3g} steps/s"


def _shown(value: object) -> str:
    return "" if value is None else str(value)


def _changing(change: Mapping[str, Any] | None) -> str:
    if change is None:
        return ""
    what = f"generation {change['generation']}, {change['config']} ({escape(change['reason'])})"
    return f"{what}: {change['phase']}, {change['nodes_ready']} of {change['nodes']} nodes are ready"


def _request(reply: Mapping[str, Any] | None) -> str:
    return escape(f"{reply['request']}: {reply['result']}: {reply['message']}") if reply is not None else ""


def _order(order: Mapping[str, Any], now: float) -> str:
    by = f"by {order['by']}" if order["by"] else ""
    said = " ".join(filter(None, (by, ago(order["since"], now))))
    return escape(": ".join(filter(None, (said, order["why"]))) or "yes")


def _last_change(fields: Mapping[str, Any] | None, now: float) -> str:
    if fields is None:
        return ""
    record = History.from_json(dict(fields))
    said = [f"generation {record.generation}", record.reason]
    if record.previous:
        stopped = stopped_training(record, {})
        said += [f"moved {size(record.moved_bytes)}", f"training stood still for {stopped}" if stopped else ""]
    text = escape(", ".join(filter(None, said)))
    return f"{text} ({ago(record.time, now)})" if record.time else text


def _survives(known: Mapping[str, Any] | None) -> str:
    if known is None:
        return ""
    what = "any one node" if known["node"] else "any one worker" if known["worker"] else "no worker without a restart"
    is_sure = known.get("known_by") != "grid" or not known["worker"]
    return what if is_sure else f"{what}, if no state is split over dp (ZeRO)"
