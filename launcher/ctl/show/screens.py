"""What `list` and `status` show to people, from the values in `facts`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from etc_agent.reconfig.known.records import History
from launcher.ctl.show.tables import grid, plain_table, size, stopped_training
from launcher.ctl.show.times import ago, length, when

_BAD = ("failed", "gone")
_MOST_NODES = 40
"""How many nodes are shown on a screen."""


def list_screen(rows: Sequence[Mapping[str, Any]], now: float) -> RenderableType:
    """One row a job."""
    table = plain_table("run id", "state", "config", "workers>", "step>", "steps/s>", "nodes>", "started")
    for row in rows:
        table.add_row(
            escape(row["run_id"]), state_of(row), row["config"] or "", _shown(row["workers"]), step_of(row),
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
        "job": f"{escape(status['run_id'])}: {state_of(status)}",
        "now": escape(status["explanation"]),
        "config": f"{status['config']} on {status['workers']} workers, generation {status['generation']}"
        if status["config"] else "",
        "step": ", ".join(filter(None, (step_of(status), per_s(status["rate_steps_per_s"])))),
        "started": f"{when(started)} ({ago(started, now)})" if started else "",
        "goodput": _goodput(status["goodput"]),
        "changing to": _changing(status["changing_to"]),
        "recovering": escape(status["recovering_from"]["why"]) if status["recovering_from"] else "",
        "wanted": escape(status["wanted"]),
        "last request": _request(status["last_request"]),
        "paused": _order(status["pause"], now) if status["pause"] is not None else "",
        "mistake": escape(status["pause_mistake"] or ""),
        "last change": _last_change(status["last_change"], now),
        "restarts": f"{used} of {most} used" if most is not None else str(used),
        "losses": f"{status['losses']} handled in place" if status["losses"] else "",
        "can lose": _survives(status["survives"]),
        "leader": escape(status["leader"] or "none"),
        "cordoned": "; ".join(f"{escape(each['name'])} {_order(each, now)}".strip() for each in status["cordons"]),
        "given up": "; ".join(escape(_given_up(each)) for each in status["given_up"]),
    }


def _given_up(config: Mapping[str, Any]) -> str:
    """The config and why; the model's reasons name it themselves."""
    named = f"{config['config']}: "
    return named + config["why"].removeprefix(named)


def _nodes_table(status: Mapping[str, Any]) -> Table:
    table = plain_table("node", "state", "address", "slots>", "ranks", "idle", "warm", "cordoned")
    for node in shown_nodes(status["nodes"]):
        failure = node["failure"]
        state = f"[red]failed: {escape(failure['error'])}" if failure else node["state"]
        cordoned = ["all" if index is None else str(index) for index in node["cordoned"]]
        table.add_row(
            escape(node["name"]), state, escape(node["address"]), str(node["slots"]), numbers(node["ranks"]),
            numbers(node["idle_slots"]), numbers(node["warm_spares"]), " ".join(cordoned),
        )
    note_hidden(table, status["nodes"])
    return table


def shown_nodes(nodes: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """The nodes that fit on a screen: those that stand out first."""
    def is_usual(node: Mapping[str, Any]) -> bool:
        return node["state"] == "ready" and not node["failure"] and not node["cordoned"] and bool(node["ranks"])

    return nodes if len(nodes) <= _MOST_NODES else sorted(nodes, key=is_usual)[:_MOST_NODES]


def note_hidden(table: Table, nodes: Sequence[Mapping[str, Any]]) -> None:
    """Say below the table how many nodes are not in it."""
    if (hidden := len(nodes) - _MOST_NODES) > 0:
        table.caption = f"and {hidden} more nodes; -o json has all"


def numbers(found: Sequence[int]) -> str:
    """Numbers in order, runs of them shortened: ``0-3 8``."""
    parts: list[list[int]] = []
    for number in sorted(found):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return " ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def state_of(row: Mapping[str, Any]) -> str:
    """``running, paused``; in red where somebody should look."""
    state = f"[red]{row['state']}[/red]" if row["state"] in _BAD else str(row["state"])
    return f"{state}, paused" if row["paused"] else state


def step_of(row: Mapping[str, Any]) -> str:
    """``7 of 100``; empty before the first step."""
    if row["step"] is None:
        return ""
    return f"{row['step']} of {row['num_steps']}" if row["num_steps"] else str(row["step"])


def _rate(rate: float | None) -> str:
    return "" if rate is None else f"{rate:.3g}"


def per_s(rate: float | None) -> str:
    """``2.5 steps/s``; empty where the rate is not known."""
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


def _goodput(known: Mapping[str, Any] | None) -> str:
    if known is None:
        return ""
    share = known["trained_s"] / max(known["life_s"], 1e-9)
    return f"{100 * share:.1f} % of {length(known['life_s'])} went into steps"


def _survives(known: Mapping[str, Any] | None) -> str:
    if known is None:
        return ""
    if "said" in known:
        return escape(known["said"])
    what = "any one node" if known["node"] else "any one worker" if known["worker"] else "no worker without a restart"
    is_sure = known.get("known_by") != "grid" or not known["worker"]
    return what if is_sure else f"{what}, if no state is split over dp (ZeRO)"
