"""Where the shapes of the page's pictures stand, in the units of their SVG drawings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from launcher.ctl.report.life import Era, Life, Span
from launcher.ctl.show.tables import size
from launcher.ctl.show.times import length, when

WIDTH = 1000.0
"""Of every drawing; the page scales it."""
_HEIGHT = 160.0
_ROW = 16.0
_MOST_NODES = 60
_LEAST_LABELLED = 60.0
_COLOURS = 8
_WIDEST = 44.0
"""Of the bar of one change."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A rectangle. `kind`: its class in the page's style sheet; `title`: shown where the pointer rests."""

    x: float
    y: float
    width: float
    height: float
    kind: str
    title: str
    label: str = ""


@dataclass(frozen=True, slots=True)
class Tick:
    """A mark on the axis of time. `anchor`: which end of the label stands at it."""

    x: float
    label: str
    anchor: str


@dataclass(frozen=True, slots=True)
class Row:
    """One node's bars, and its name beside them."""

    y: float
    name: str
    bars: tuple[Bar, ...]


@dataclass(frozen=True, slots=True)
class Drawing:
    """Everything that the page draws. `height`: of the timeline; `nodes_height`, `stops_height`: of the others.
    `hidden_nodes`: nodes that are left out since they had workers all the time."""

    timeline: tuple[Bar, ...]
    marks: tuple[Bar, ...]
    ticks: tuple[Tick, ...]
    height: float
    most_workers: int
    rows: tuple[Row, ...]
    nodes_height: float
    hidden_nodes: int
    stops: tuple[Bar, ...]
    stops_height: float
    longest_stop: str


def draw(life: Life) -> Drawing:
    """The page's pictures."""
    configs = list(dict.fromkeys(era.record.config for era in life.eras))
    most = max((era.workers for era in life.eras), default=1) or 1
    rows, hidden = _rows(life)
    stops, longest = _stops(life)
    return Drawing(
        tuple(_era_bar(era, life.span, configs.index(era.record.config), most) for era in life.eras),
        tuple(_marks(life)), tuple(_ticks(life.span)), _HEIGHT, most, rows, _ROW * max(1, len(rows)), hidden, stops,
        _HEIGHT, longest,
    )


def _x(at: float, span: Span) -> float:
    return round(WIDTH * (at - span.begin) / max(span.seconds, 1e-9), 2)


def _era_bar(era: Era, span: Span, colour: int, most: int) -> Bar:
    x, end = _x(era.span.begin, span), _x(era.span.end, span)
    height = max(4.0, _HEIGHT * era.workers / most)
    record = era.record
    held = ", state held without training" if not era.workers else ""
    title = (
        f"generation {record.generation}: {record.config} on {era.workers} workers{held}, from {when(record.time)} for "
        f"{length(era.span.seconds)}: {record.reason}"
    )
    wide = end - x >= _LEAST_LABELLED
    kind = f"c{colour % _COLOURS}" if era.workers else "held"
    return Bar(x, _HEIGHT - height, max(1.0, end - x), height, kind, title, record.config if wide else "")


def _marks(life: Life) -> list[Bar]:
    """Losses and withdrawn generations, as lines over the timeline."""
    marks = []
    for era in life.failures:
        fresh = "all workers were restarted" if era.record.previous == 0 else "handled in place"
        title = f"{when(era.record.time)}: {era.record.reason} ({fresh})"
        marks.append(Bar(_x(era.span.begin, life.span), 0.0, 2.0, _HEIGHT, "failure", title))
    for record in life.withdrawn:
        title = f"{when(record.time)}: generation {record.generation}, {record.config}, withdrawn: {record.why}"
        marks.append(Bar(_x(record.time, life.span), 0.0, 2.0, _HEIGHT, "withdrawn", title))
    return marks


def _ticks(span: Span, number: int = 6) -> list[Tick]:
    steps = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400)
    wanted = span.seconds / number
    step = next((step for step in steps if step >= wanted), 86400 * math.ceil(wanted / 86400))
    ticks = []
    for at in range(0, math.floor(span.seconds) + 1, step):
        x = _x(span.begin + at, span)
        ticks.append(Tick(x, length(at), "start" if x < WIDTH - _LEAST_LABELLED else "end"))
    return ticks


def _rows(life: Life) -> tuple[tuple[Row, ...], int]:
    """A row for each node, those that come and go first where there are many."""
    whole = (Span(life.eras[0].span.begin, life.eras[-1].span.end),) if life.eras else ()
    names = sorted(life.presence)
    if len(names) > _MOST_NODES:
        names.sort(key=lambda name: life.presence[name] == whole)
    rows = []
    for number, name in enumerate(names[:_MOST_NODES]):
        y = number * _ROW
        bars = tuple(_node_bar(name, span, life.span, y) for span in life.presence[name])
        rows.append(Row(y, name, bars))
    return tuple(rows), max(0, len(names) - _MOST_NODES)


def _node_bar(name: str, span: Span, whole: Span, y: float) -> Bar:
    x, end = _x(span.begin, whole), _x(span.end, whole)
    title = f"{name}: workers from {when(span.begin)} for {length(span.seconds)}"
    return Bar(x, y + 2, max(1.0, end - x), _ROW - 4, "node", title)


def _stops(life: Life) -> tuple[tuple[Bar, ...], str]:
    """A bar for each change whose stop time is known, on a scale up to the longest."""
    changes: Sequence[Era] = life.changes
    longest = max((era.record.stop_ms or 0.0 for era in changes), default=0.0)
    step = min(_WIDEST, WIDTH / max(1, len(changes)))
    bars = []
    for number, era in enumerate(changes):
        record = era.record
        height = max(2.0, _HEIGHT * (record.stop_ms or 0.0) / max(longest, 1e-9))
        phases = ", ".join(f"{name} {milliseconds:.0f} ms" for name, milliseconds in record.phases_ms.items())
        title = (
            f"generation {record.generation}, {record.config}: {record.stop_ms:.0f} ms ({phases}), "
            f"{size(record.moved_bytes)} moved"
        )
        kind = "failure" if era.is_failure else "stop"
        bars.append(Bar(number * step + 1, _HEIGHT - height, max(1.0, step - 2), height, kind, title))
    return tuple(bars), f"{longest:.0f} ms"
