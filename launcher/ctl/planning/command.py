"""``etc-ctl plan``: what a change of size would move, computed without a cluster."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from math import isfinite
from pathlib import Path

import click
import yaml
from rich.console import Console
from rich.table import Table

from etc_agent.parallel.config import ParallelConfig
from etc_agent.parallel.topology import Node, Topology
from etc_agent.planner.placing.model_atoms import model_atoms
from etc_agent.planner.placing.placement import place_atoms
from etc_agent.planner.predict import Device, Training, rank_configs
from etc_agent.simulator.summary import PlanSummary, summarise
from etc_agent.state.model import ModelDescription
from etc_agent.state.sharding import Sharding
from launcher.ctl.options import output_option
from launcher.ctl.planning.plot import draw
from launcher.ctl.show.output import Output

_GROUP = re.compile(r"([0-9]+)x([0-9]+)")
MODELS = Path(__file__).resolve().parents[2] / "models"
"""The model descriptions that come with this package, one YAML file each."""
_MAX_NODES_SHOWN = 24
_MAX_SLOTS = 1 << 17


def known_models() -> list[str]:
    """The names of the model descriptions that come with this package."""
    return sorted(path.stem for path in MODELS.glob("*.yaml"))


def read_model(name: str) -> ModelDescription:
    """A description from a YAML or JSON file, or one of those in launcher/models by its name.

    Raises:
        ValueError: there is no such file, or what is in it is no description.
    """
    path, shipped = Path(name), MODELS / f"{name}.yaml"
    if not path.is_file() and (shipped.exists() or not path.exists()):
        path = shipped
    if not path.exists():
        raise ValueError(
            f"--model {name}: no such file, and none of the known models ({', '.join(known_models())})"
        )
    try:
        value = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ValueError(f"--model {name}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"--model {name}: not YAML or JSON: {' '.join(str(error).split())}") from None
    if not isinstance(value, dict):
        raise ValueError(f"--model {name}: expected a mapping of fields such as num_layers and hidden")
    try:
        return ModelDescription.from_json(value)
    except ValueError as error:
        raise ValueError(f"--model {name}: {error}") from None


def read_config(option: str, text: str) -> ParallelConfig:
    """A parallel config given with `option`. Raises ValueError, which names the option, where it is none."""
    try:
        return ParallelConfig.parse(text)
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from None


def read_nodes(text: str, *, num_nics: int | None, nic_gbit: float, own_nics: bool) -> Topology:
    """``3x8`` is three nodes of eight slots; ``2x8+1x4`` adds one of four.

    Raises:
        ValueError: `text` is not of that form.
    """
    groups = [_GROUP.fullmatch(part.strip()) for part in text.split("+")]
    if any(group is None or 0 in map(int, group.groups()) for group in groups):
        raise ValueError(f"--nodes {text!r}: write nodes x slots, like 3x8 or 2x8+1x4")
    num_slots = sum(int(group[1]) * int(group[2]) for group in groups if group is not None)
    if num_slots > _MAX_SLOTS:
        raise ValueError(f"--nodes {text!r}: {num_slots} slots are more than the {_MAX_SLOTS} that can be planned")
    sizes = [int(group[2]) for group in groups if group is not None for _ in range(int(group[1]))]
    return Topology(tuple(
        Node(f"node-{index}", size, num_nics or size, nic_gbit * 1e9 / 8, not own_nics)
        for index, size in enumerate(sizes)
    ))


@click.command("plan", context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--model", required=True,
              help=f"A YAML or JSON file that describes the model, or one of {', '.join(known_models())}.")
@click.option("--from", "before", required=True, help="Present parallel config, like PP4TP2.")
@click.option("--to", "after", help="New parallel config. Without it the best one for the nodes is chosen.")
@click.option("--nodes", required=True, help="The cluster, as nodes x slots: 3x8, or 2x8+1x4.")
@click.option("--policy", type=click.Choice(["etc", "paper"]), default="etc", show_default=True)
@click.option("--least", type=click.Choice(["time", "bytes"]), default="time", show_default=True,
              help="What to minimise first.")
@click.option("--pack/--no-pack", default=None, help="Occupy the fewest nodes. Default: when the job shrinks.")
@click.option("--exclude", multiple=True, help="A node to be drained, like node-2: it gives its state and takes none.")
@click.option("--nics", type=click.IntRange(1), help="NICs per node.  [default: one per slot]")
@click.option("--nic-gbit", type=click.FloatRange(0, min_open=True), default=100.0, show_default=True,
              help="Speed of a NIC in Gb/s.")
@click.option("--own-nics", is_flag=True, help="Each slot is bound to one NIC instead of sharing its node's.")
@click.option("--split-groups", is_flag=True,
              help="A tp group may span nodes even where it fits in one (as in the paper's Table II).")
@click.option("--zero1", is_flag=True, help="Optimizer state is split over data-parallel replicas.")
@click.option("--memory-gib", type=click.FloatRange(0, min_open=True), default=80.0, show_default=True,
              help="Memory of a slot, for choosing a config.")
@click.option("--global-batch", type=click.IntRange(1), default=256, show_default=True,
              help="Sequences per step, for choosing a config.")
@click.option("--budget-gib", type=click.FloatRange(0, min_open=True),
              help="Most state a worker may hold at any time during the change; buffers come on top.")
@click.option("--forwarding", is_flag=True, help="New replicas pass on what they receive.")
@output_option
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Write a picture (SVG).")
def plan(
    model: str, before: str, after: str | None, nodes: str, policy: str, least: str, pack: bool | None,
    exclude: Sequence[str], nics: int | None, nic_gbit: float, own_nics: bool, split_groups: bool, zero1: bool,
    memory_gib: float, global_batch: int, budget_gib: float | None, forwarding: bool, plot: Path | None,
    output: Output,
) -> None:
    """Show what a change of the parallel config would move, without a cluster."""
    try:
        if not all(map(isfinite, (nic_gbit, memory_gib, budget_gib or 0.0))):
            raise ValueError("--nic-gbit, --memory-gib and --budget-gib take finite numbers")
        if policy == "paper" and (pack or forwarding or split_groups or least != "time" or budget_gib is not None):
            raise ValueError(
                "policy paper has one way to plan; leave out --pack, --least, --split-groups, --budget-gib and "
                "--forwarding"
            )
        result, why = _plan(
            model, before, after, read_nodes(nodes, num_nics=nics, nic_gbit=nic_gbit, own_nics=own_nics), policy, least,
            pack, exclude, split_groups, zero1, memory_gib, global_batch, budget_gib, forwarding,
        )
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    if plot is not None:
        try:
            plot.write_text(draw(result))
        except OSError as error:
            raise click.ClickException(f"--plot {plot}: {error.strerror}") from None
    if output.form == "json":
        click.echo(json.dumps(result.to_json() | ({"choice": why.splitlines()} if why else {})))
        return
    if why:
        click.echo(why)
    _print(result, least=least, forwarding=forwarding)


def _plan(
    model_name: str, before: str, after: str | None, topology: Topology, policy: str, least: str, pack: bool | None,
    exclude: Sequence[str], split_groups: bool, zero1: bool, memory_gib: float, global_batch: int,
    budget_gib: float | None, forwarding: bool,
) -> tuple[PlanSummary, str]:
    """(the summary, why this config was chosen)."""
    model = read_model(model_name)
    model = replace(model, zero1=model.zero1 or zero1)
    for name in exclude:
        topology.node(name)
    present = read_config("--from", before)
    if present.num_ranks > len(topology.slots):
        raise ValueError(f"--from {present} has {present.num_ranks} ranks, --nodes {len(topology.slots)} slots")
    previous = Sharding(model, present)

    def summary_of(config: ParallelConfig, packed: bool | None) -> PlanSummary:
        shrinks = config.num_ranks < present.num_ranks
        return summarise(
            previous, Sharding(model, config), topology,
            policy="paper" if policy == "paper" else "etc", least="bytes" if least == "bytes" else "time",
            pack=shrinks if packed is None else packed, excluded=exclude,
            budget_bytes=None if budget_gib is None else int(budget_gib * (1 << 30)), forwarding=forwarding,
            group_size=1 if split_groups else None,
        )

    if after is not None:
        return summary_of(read_config("--to", after), pack), ""
    free = [slot for slot in topology.slots if slot.node not in exclude]
    choice = rank_configs(
        model, len(free), topology,
        device=Device(memory_bytes=int(memory_gib * (1 << 30))), training=Training(global_batch=global_batch),
        migration_s=lambda config: _migration_s(previous, config, topology, exclude),
    )
    return summary_of(choice.best, pack), choice.explain()


def _migration_s(
    previous: Sharding, config: ParallelConfig, topology: Topology, exclude: Sequence[str]
) -> float:
    """Predicted seconds of the change to `config`."""
    table = model_atoms(previous, Sharding(previous.model, config))
    where = topology.slots[: previous.config.num_ranks]
    return place_atoms(
        table, topology.slots, where, topology, group_size=config.tp, excluded=exclude
    ).bottleneck_s


def _print(result: PlanSummary, *, least: str, forwarding: bool) -> None:
    console = Console(soft_wrap=True, highlight=False)
    sketch, topology = result.sketch, result.topology
    console.print(
        f"{result.previous.model.name}: {result.previous.config} ({result.previous.config.num_ranks} ranks) -> "
        f"{result.current.config} ({result.current.config.num_ranks} ranks) on {len(topology.nodes)} nodes, "
        + (f"least {least} first" if result.policy == "etc" else "policy paper")
    )
    if len(topology.nodes) <= _MAX_NODES_SHOWN:
        console.print(_node_table(result))
    kept = sum(result.kept_bytes)
    console.print(
        f"kept in place {_size(kept)}, moved {_size(sketch.moved_bytes)}, "
        f"between nodes {_size(sketch.between_nodes_bytes)}; "
        f"{len(sketch.pairs)} of {len(sketch.placement)} ranks on a worker that was there, "
        f"{sketch.num_nodes} nodes occupied"
    )
    # The bound holds where every receiver takes its bytes from the previous generation.
    beside = " without forwarding" if forwarding else ""
    bound = f" (no placement beats {sketch.bound_s:.4g} s)" if result.policy == "etc" and not forwarding else ""
    console.print(f"busiest port {sketch.bottleneck_s:.4g} s{beside}{bound}, predicted {result.predicted_s:.4g} s")
    if result.port_bytes is not None and result.peak_bytes is not None:
        name, (sent, received) = max(result.port_bytes.items(), key=lambda item: max(item[1]))
        console.print(f"busiest link {name}: {_size(sent)} sent, {_size(received)} received between nodes")
        console.print(
            f"{result.num_transfers} transfers in {result.num_rounds} rounds; peak state of a worker "
            f"{_size(max(result.peak_bytes))}, beside it up to {_size(result.buffer_bytes or 0)} of buffers; "
            f"plan {(result.digest or '')[:12]}"
        )


def _node_table(result: PlanSummary) -> Table:
    """Per node: its ranks, bytes kept, and bytes over its links; by transfers where the plan is written out."""
    written = result.traffic is not None
    table = Table("node", "before", "after", "kept", "received", *(["out", "in", "peak"] if written else []), box=None)
    for index, node in enumerate(result.topology.nodes):
        was = [str(rank) for rank, slot in enumerate(result.previous_placement) if slot.node == node.name]
        now = [rank for rank, slot in enumerate(result.sketch.placement) if slot.node == node.name]
        kept = sum(result.kept_bytes[rank] for rank in now)
        needed = sum(result.needed_bytes[rank] for rank in now)
        cells = [node.name, " ".join(was) or "-", " ".join(map(str, now)) or "-", _size(kept), _size(needed - kept)]
        if result.traffic is not None and result.workers is not None and result.peak_bytes is not None:
            inside = int(result.traffic[index, index])
            peaks = [peak for slot, peak in zip(result.workers, result.peak_bytes, strict=True) if slot in node.slots]
            cells += [
                _size(int(result.traffic[index].sum()) - inside), _size(int(result.traffic[:, index].sum()) - inside),
                _size(max(peaks, default=0)),
            ]
        table.add_row(*cells)
    return table


def _size(num_bytes: int) -> str:
    value = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.3g} {unit}" if unit != "B" else f"{num_bytes} B"
        value /= 1000
    return f"{value:.4g} TB"
