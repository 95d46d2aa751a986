"""Compares etc-run with torchrun: the same command lines under both, our agent's path against torchrun's c10d.

    python tests/launcher/compare.py [--write] [CASE ...]

prints the table of docs/torchrun.md, or with --write puts it there. Exit code 1: something differs that
comparison/cases.py does not list.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from tests.launcher.comparison.cases import CASES, DIFFERENCES, OWN_VALUES, Aspect, Case  # noqa: E402
from tests.launcher.comparison.launch import Seen, run  # noqa: E402

DOCUMENT = ROOT / "docs" / "torchrun.md"
BEGIN, END = "<!-- tests/launcher/compare.py --write -->", "<!-- end -->"


@dataclass(frozen=True, slots=True)
class Comparison:
    """One command line under both launchers."""

    case: Case
    torchrun: Seen
    etc_run: Seen

    def differs(self, aspect: Aspect) -> bool:
        return bool(self.torchrun[aspect] != self.etc_run[aspect])

    def unlisted(self) -> list[str]:
        """Every difference that is not a listed one, and every listed one that is gone, for people."""
        found = []
        for aspect in Aspect:
            may_differ = aspect in self.case.differs
            if self.differs(aspect) and not may_differ:
                found.append(
                    f"{self.case.name}: {aspect}:\n  torchrun {_shown(self.torchrun, aspect)}\n"
                    f"  etc-run  {_shown(self.etc_run, aspect)}\n{self.etc_run.output[-2000:]}"
                )
        if self.case.differs and not any(self.differs(aspect) for aspect in self.case.differs):
            found.append(f"{self.case.name}: no listed difference is left; remove it from the list")
        return found

    def row(self) -> str:
        """This comparison as a row of the table."""
        options = " ".join(self.case.options).replace("|", "\\|")
        cells = [f"{self.case.name}<br>`{options}`" if options else self.case.name]
        return "| " + " | ".join(cells + [self._cell(aspect) for aspect in Aspect]) + " |"

    def _cell(self, aspect: Aspect) -> str:
        theirs, ours = self.torchrun[aspect], self.etc_run[aspect]
        if not self.differs(aspect):
            return str(ours) if aspect is Aspect.EXIT else "same" if ours else ""
        key = self.case.differs.get(aspect, "unlisted")
        change = f"{theirs} -> {ours} " if aspect is Aspect.EXIT else ""
        return f"{change}[{key}](#{key})"


def _shown(seen: Seen, aspect: Aspect) -> str:
    return json.dumps(seen[aspect], sort_keys=True)


def compare(cases: Iterable[Case], num_at_once: int = 4) -> list[Comparison]:
    """Run all `cases` under both launchers."""
    with tempfile.TemporaryDirectory(prefix="compare-") as folder, ThreadPoolExecutor(num_at_once) as pool:

        def both(numbered: tuple[int, Case]) -> Comparison:
            number, case = numbered
            seen = [run(case, launcher, Path(folder, f"{number}-{launcher}")) for launcher in ("torchrun", "etc-run")]
            return Comparison(case, *seen)

        return list(pool.map(both, enumerate(cases)))


def table(comparisons: Iterable[Comparison]) -> str:
    """The table and the reasons, as Markdown."""
    heads = ["command line", *Aspect]
    lines = ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
    lines += [comparison.row() for comparison in comparisons]
    lines += ["", "Where they differ, and why:", ""]
    lines += [f"* <a id=\"{key}\"></a>**{key}**: {reason}" for key, reason in DIFFERENCES.items()]
    lines += ["", "Variables whose values are each launcher's own:", ""]
    lines += [f"* `{name}`: {reason}." for name, reason in OWN_VALUES.items()]
    return "\n".join(lines)


def documented() -> str:
    """The table as docs/torchrun.md has it."""
    _, _, rest = DOCUMENT.read_text().partition(BEGIN + "\n")
    return rest.partition("\n" + END)[0]


def _main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--write", action="store_true", help="put the table into docs/torchrun.md")
    parser.add_argument("case", nargs="*", help="only cases whose names contain this")
    args = parser.parse_args()
    if args.write and args.case:
        parser.error("--write needs all cases")
    chosen = [case for case in CASES if not args.case or any(part in case.name for part in args.case)]
    comparisons = compare(chosen, num_at_once=2 * (os.cpu_count() or 1))
    text = table(comparisons)
    if args.write:
        before, _, rest = DOCUMENT.read_text().partition(BEGIN + "\n")
        DOCUMENT.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}")
    else:
        print(text)
    unlisted = [line for comparison in comparisons for line in comparison.unlisted()]
    print(*unlisted, sep="\n\n", file=sys.stderr)
    return int(bool(unlisted))


if __name__ == "__main__":
    sys.exit(_main())
