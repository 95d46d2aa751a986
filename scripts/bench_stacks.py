"""What it takes to make the training stacks of examples/ elastic, and what that costs.

Real etcd, real agents, the scripts that users run. For each stack, a job under etc-run changes its size again and again
while it trains; the script for torchrun runs at a fixed size and must show the same losses.

* lines_changed: of the elastic script against the one for torchrun.
* changes, refused: asked for, and answered with anything but "done".
* max_loss_difference: of a step, against the unchanged run, in the dtype that the row names.
* stop_s: the median over changes of the time from the end of the last step before it to that of the first after it,
  less one step.
* steady_overhead_percent: a step under etc-run against one under torchrun, at the same size in float32.

The last line is one JSON object.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import click
from rich.console import Console
from rich.table import Table

from tests.stacks.catalogue import ALL
from tests.stacks.harness import Stack, changed_lines, differences, run_changing, run_fixed, step_s

TIMEOUT_S = 600.0
STEPS = 100
"""Over which the time of a step is taken."""


def measured(stack: Stack, folder: Path, num_changes: int, rounds: int) -> dict[str, Any]:
    sizes = tuple(itertools.islice(itertools.cycle((*stack.sizes, stack.start)), num_changes))
    changing = run_changing(replace(stack, sizes=sizes), folder, timeout_s=TIMEOUT_S)
    fixed = run_fixed(stack, folder, max(changing.losses), timeout_s=TIMEOUT_S * num_changes)
    plain = replace(stack, options=tuple(each for each in stack.options if "dtype" not in each and each != "float64"))
    pairs = []
    for number in range(rounds):
        own = folder / f"steady-{number}"
        own.mkdir()
        pairs.append([step_s(launcher, plain, own, 2, STEPS, TIMEOUT_S) for launcher in ("torchrun", "etc-run")])
    theirs, ours = (statistics.median(times) for times in zip(*pairs, strict=True))
    stops = [max(0.0, seconds - ours) for seconds in changing.first_steps_s]
    return {
        "lines_changed": len(changed_lines(stack)),
        "changes": num_changes,
        "refused": sum(reply["result"] != "done" for reply in changing.replies),
        "max_loss_difference": differences(stack, changing, fixed)[0],
        "dtype": "float64" if "float64" in stack.options else "float32",
        "stop_s": round(statistics.median(stops), 3),
        "worst_stop_s": round(max(stops), 3),
        "steady_overhead_percent": round(100 * (ours / theirs - 1), 1),
    }


@click.command()
@click.option("--only", multiple=True, help="Names of stacks; all by default.")
@click.option("--changes", default=20, show_default=True, help="Changes of size per stack.")
@click.option("--rounds", default=3, show_default=True, help="Runs of each kind for the overhead.")
def main(only: Sequence[str], changes: int, rounds: int) -> None:
    """Measure the stacks of examples/."""
    shown = Console(highlight=False, width=160)
    found: dict[str, dict[str, Any]] = {}
    for stack in ALL:
        if only and stack.name not in only:
            continue
        name = stack.name if stack.name not in found else f"{stack.name} {' '.join(stack.options[-2:])}"
        with tempfile.TemporaryDirectory() as folder:
            found[name] = measured(stack, Path(folder), changes, rounds)
        shown.print(f"{name}: {found[name]}")
    columns = list(next(iter(found.values())))
    table = Table("stack", *columns)
    for name, row in found.items():
        table.add_row(name, *(str(row[column]) for column in columns))
    shown.print(table)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
