"""A plan as a picture (SVG): who is where before and after, and the bytes from node to node."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

from etc_agent.parallel.config import ParallelConfig
from etc_agent.parallel.topology import Slot, Topology
from etc_agent.simulator.summary import PlanSummary

_CELL = 34
_LABEL = 90
_GAP = 40
_TOP = 64
_MIN_WIDTH = 720
_PALETTE = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#edc948", "#b07aa1", "#9c755f")


def draw(result: PlanSummary) -> str:
    """The SVG document."""
    topology = result.topology
    widest = max(node.num_slots for node in topology.nodes)
    panel = _LABEL + widest * _CELL
    height = _TOP + len(topology.nodes) * _CELL + _GAP
    second, third = panel + _GAP, 2 * (panel + _GAP)
    last = 0 if result.traffic is None else _LABEL + len(topology.nodes) * _CELL + _GAP
    width = max(third + last, _MIN_WIDTH)
    shapes = [
        _text(10, 22, f"{result.previous.model.name}: {result.previous.config} to {result.current.config}, policy "
              f"{result.policy}, {result.sketch.moved_bytes / 1e9:.2f} GB moved, busiest port "
              f"{result.sketch.bottleneck_s:.3g} s", size=14),
        *_grid(10, "before", topology, result.previous_placement, result.previous.config),
        *_grid(second, "after", topology, result.sketch.placement, result.current.config),
    ]
    shapes.append(_text(10, height - 12, "squares are slots, coloured by stage and numbered by virtual rank", size=11))
    if result.traffic is not None:
        shapes += _matrix(third, topology, result.traffic.tolist())
    body = "\n".join(shapes)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )


def _grid(
    left: int, title: str, topology: Topology, placement: Sequence[Slot], config: ParallelConfig
) -> list[str]:
    """One row per node, one square per slot, coloured by stage and numbered by virtual rank."""
    rank_on = {slot: rank for rank, slot in enumerate(placement)}
    shapes = [_text(left, _TOP - 12, f"{title}: {config}")]
    for row, node in enumerate(topology.nodes):
        y = _TOP + row * _CELL
        shapes.append(_text(left, y + 22, node.name))
        for column, slot in enumerate(node.slots):
            x = left + _LABEL + column * _CELL
            rank = rank_on.get(slot)
            if rank is None:
                shapes.append(_square(x, y, "#eeeeee", "idle"))
                continue
            at = config.coordinate(rank)
            colour = _PALETTE[at.pp % len(_PALETTE)]
            shapes.append(_square(x, y, colour, f"rank {rank}: pp {at.pp}, dp {at.dp}, tp {at.tp}"))
            shapes.append(_text(x + _CELL // 2 - 2, y + 21, str(rank), fill="white", anchor="middle"))
    return shapes


def _matrix(left: int, topology: Topology, traffic: Sequence[Sequence[int]]) -> list[str]:
    """Bytes from the node of the row to the node of the column."""
    largest = max((max(row) for row in traffic), default=0) or 1
    shapes = [_text(left, _TOP - 28, "GB from node (row) to node (column)")]
    for column, node in enumerate(topology.nodes):
        label = node.name.rpartition("-")[2]
        shapes.append(_text(left + _LABEL + column * _CELL + _CELL // 2 - 2, _TOP - 8, label, anchor="middle", size=10))
    for row, node in enumerate(topology.nodes):
        y = _TOP + row * _CELL
        shapes.append(_text(left, y + 22, node.name))
        for column, size in enumerate(traffic[row]):
            x = left + _LABEL + column * _CELL
            shade = round(255 - 175 * size / largest)
            fill = f"rgb({shade},{shade},255)" if size else "#f8f8f8"
            shapes.append(_square(x, y, fill, f"{node.name} to {topology.nodes[column].name}: {size} bytes"))
            if size:
                shapes.append(_text(x + _CELL // 2 - 2, y + 21, f"{size / 1e9:.3g}", anchor="middle", size=10))
    return shapes


def _square(x: int, y: int, fill: str, title: str) -> str:
    side = _CELL - 4
    return (
        f'<rect x="{x}" y="{y}" width="{side}" height="{side}" rx="3" fill="{fill}" stroke="#999999">'
        f"<title>{escape(title)}</title></rect>"
    )


def _text(x: int, y: int, text: str, *, fill: str = "black", anchor: str = "start", size: int = 12) -> str:
    return f'<text x="{x}" y="{y}" font-size="{size}" fill="{fill}" text-anchor="{anchor}">{escape(text)}</text>'
