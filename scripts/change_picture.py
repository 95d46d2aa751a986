"""Draws a change of size as one picture: docs/change.svg.

Two workers become three. It is not to scale: a preparation takes seconds, the stop some hundredths of one.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

TARGET = Path(__file__).resolve().parents[1] / "docs" / "change.svg"
WIDTH, LEFT, TOP, LANE, BAR = 960, 120, 84, 64, 26
STEP, STOP = 58, 44
COLOURS = {"step": "#4c78a8", "prepare": "#f2cf5b", "switch": "#e45756", "new step": "#54a24b", "start": "#bab0ac"}


@dataclass(frozen=True)
class Box:
    """A bar of `lane`, from `start` to `end` in pixels; `row` 1 is drawn below it: what happens beside."""

    kind: str
    lane: int
    start: float
    end: float
    text: str = ""
    row: int = 0


def boxes() -> list[Box]:
    switch = LEFT + 7 * STEP
    after = switch + STOP
    found = []
    for lane in (0, 1):
        found += [Box("step", lane, LEFT + n * STEP, LEFT + (n + 1) * STEP - 2, str(40 + n)) for n in range(7)]
        beside = Box("prepare", lane, LEFT + 2.2 * STEP, LEFT + 6.2 * STEP, "build on meta, groups, plan", row=1)
        found.append(beside)
    found += [
        Box("start", 2, LEFT + 0.9 * STEP, LEFT + 2.2 * STEP - 2, "warm spare"),
        Box("prepare", 2, LEFT + 2.2 * STEP, LEFT + 6.2 * STEP, "the same", row=0),
    ]
    for lane in range(3):
        found.append(Box("switch", lane, switch, after - 2))
        found += [Box("new step", lane, after + n * STEP, after + (n + 1) * STEP - 2, str(47 + n)) for n in range(5)]
    return found


def drawn() -> str:
    lanes = ("worker 0", "worker 1", "worker 2")
    switch, bottom = LEFT + 7 * STEP, TOP + len(lanes) * LANE
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 66}" font-family="sans-serif" '
        'font-size="13">',
        '<title>A change from two workers to three, while they train</title>',
        f'<rect width="{WIDTH}" height="{bottom + 66}" fill="white"/>',
        f'<text x="{LEFT + 2.1 * STEP}" y="24" text-anchor="middle">control/scale = 3</text>',
        f'<path d="M{LEFT + 2.1 * STEP} 30 V{TOP - 30}" stroke="#333" stroke-dasharray="3 3"/>',
        f'<text x="{LEFT}" y="{TOP - 14}" fill="#4c78a8">generation 1: PP1TP1DP2</text>',
        f'<text x="{switch + STOP}" y="{TOP - 14}" fill="#54a24b">generation 2: PP1TP1DP3</text>',
        f'<text x="{switch + STOP / 2}" y="{TOP - 34}" text-anchor="middle" fill="#e45756">the stop</text>',
        f'<path d="M{switch + STOP / 2} {TOP - 28} V{TOP - 4}" stroke="#e45756"/>',
    ]
    for number, name in enumerate(lanes):
        lines.append(f'<text x="12" y="{TOP + number * LANE + 18}">{name}</text>')
    for box in boxes():
        y = TOP + box.lane * LANE + box.row * (BAR + 2)
        height = BAR if box.row == 0 else BAR - 8
        lines.append(
            f'<rect x="{box.start:g}" y="{y}" width="{box.end - box.start:g}" height="{height}" rx="3" '
            f'fill="{COLOURS[box.kind]}"/>'
        )
        if box.text:
            colour = "#333" if box.kind in ("prepare", "start") else "white"
            middle = (box.start + box.end) / 2
            lines.append(
                f'<text x="{middle:g}" y="{y + height / 2 + 4:g}" text-anchor="middle" font-size="11" '
                f'fill="{colour}">{box.text}</text>'
            )
    shown = (
        (12, "step", "a step, old size"), (150, "start", "a process that waits, torch loaded"),
        (395, "prepare", "prepared beside training"), (590, "switch", "tensors move, vote"),
        (760, "new step", "a step, new size"),
    )
    for x, kind, text in shown:
        lines.append(f'<rect x="{x}" y="{bottom + 18}" width="14" height="14" rx="3" fill="{COLOURS[kind]}"/>')
        lines.append(f'<text x="{x + 20}" y="{bottom + 30}" font-size="12">{text}</text>')
    lines.append(
        f'<text x="12" y="{bottom + 56}" font-size="12" fill="#555">The processes of workers 0 and 1 stay; a step is '
        "applied on all ranks or on none; not to scale.</text>"
    )
    return "\n".join([*lines, "</svg>"]) + "\n"


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else TARGET
    target.write_text(drawn())
