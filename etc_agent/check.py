"""Whether a script can change its size, found out without a cluster: ``python -m etc_agent.check SCRIPT``."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from etc_agent.errors import named
from etc_agent.parallel.config import ParallelConfig
from etc_agent.worker.data.division import DIVISIONS, Division, GlobalBatch

if TYPE_CHECKING:
    from etc_agent.worker.checking import Answer


class Mistake(click.ClickException):
    """Something is wrong with the command; one line says what."""

    exit_code = 2

    def show(self, file: Any = None) -> None:
        click.echo(f"etc-ctl check: {self.format_message()}", err=True)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("script")
@click.option(
    "--configs", default="DP1,DP2", show_default=True, help="Between which the job is to change, with commas."
)
@click.option("--global-batch", default=0, help="As given to etc.session; by default one that every dp divides.")
@click.option("--division", type=click.Choice(DIVISIONS), default="equal", show_default=True, help="Likewise.")
@click.option("--seed", default=0, show_default=True, help="Likewise.")
@click.option(
    "--memory-mb", default=1024, show_default=True, help="Try init where the state of all ranks takes no more."
)
@click.option("--json", "is_json", is_flag=True, help="One JSON object instead of text.")
def main(
    script: str, configs: str, global_batch: int, division: Division, seed: int, memory_mb: int, is_json: bool
) -> None:
    """Build a job's model under some parallel configs, without peers and without memory, and say what would be refused,
    what is lost in a change, and what `init` leaves without a value.

    SCRIPT is module:NAME or path/to/script.py:NAME; NAME is that of the function which is given to etc.session, by
    default build. The script is imported: what opens the session has to be under ``if __name__ == "__main__"``.

    Exit codes: 0 nothing would be refused, 1 something would, 2 a mistake in the command.

    \b
    etc-ctl check train.py --configs DP1,DP2,TP2DP2 --global-batch 32
    python -m etc_agent.check my_job.train:build --configs PP2TP2DP1,DP4
    """
    from etc_agent.worker.checking import check  # loads torch, which --help does not need

    build = _find(script)
    try:
        parsed = [ParallelConfig.parse(each.strip()) for each in configs.split(",")]
    except ValueError as error:
        raise Mistake(f"--configs: {error}") from None
    num_samples = global_batch or _common_multiple(parsed)
    answer = check(build, parsed, GlobalBatch(num_samples, division), seed, memory_mb << 20)
    if is_json:
        click.echo(json.dumps(asdict(answer)))
    else:
        _print(answer)
    sys.exit(0 if answer.is_fine else 1)


def _find(script: str) -> Any:
    place, _, name = script.partition(":") if not Path(script).is_file() else (script, "", "")
    name = name or "build"
    try:
        module = _import(place)
    except SystemExit as end:
        raise Mistake(f"{place} ends when it is imported (exit code {end.code})") from None
    except Exception as error:
        raise Mistake(f"{place} cannot be imported: {named(error)}") from error
    if not hasattr(module, name):
        raise Mistake(f"{place} has no {name}; write {place}:NAME for what is given to etc.session")
    return getattr(module, name)


def _import(place: str) -> Any:
    sys.path.insert(0, os.getcwd())
    if not place.endswith(".py"):
        return importlib.import_module(place)
    path = Path(place).absolute()
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise Mistake(f"{place}: no such file")
    sys.path.insert(0, str(path.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _common_multiple(configs: list[ParallelConfig]) -> int:
    product = 1
    for config in configs:
        product *= config.dp if product % config.dp else 1
    return product


def _print(answer: Answer) -> None:
    for built in answer.built:
        click.echo(
            f"{built.config}: possible; {built.num_ranks} ranks, {built.num_tensors} tensors, "
            f"{built.most_bytes:,} bytes on the largest rank"
        )
    for found in answer.findings:
        click.echo(f"{found.kind}: {found.where}: {found.text}")
    if answer.is_fine:
        click.echo("nothing would be refused")


if __name__ == "__main__":
    main(prog_name="etc-ctl check")
