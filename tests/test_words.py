"""One word, one thing: code and docs keep to the glossary in docs/architecture.md, as far as a program can tell."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

RETIRED = {
    "anew": "fresh start, or restart",
    "farewell": "confirmation that the vote was seen",
    "wish": "request",
    "let go": "free, close, or drop",
    "letting go": "retire, free, or close",
    "spare node": "waiting node",
    "shard file": "shard dump",
}
"""Words that meant several things, and what to write instead."""

ROOMS_OF = {
    "report": (
        "etc_agent/migration/", "etc_agent/worker/change/switch.py", "etc_agent/worker/change/elastic.py",
        "launcher/ctl/commands/reporting.py", "launcher/ctl/main.py",
    ),
    "verify": ("etc_agent/migration/", "etc_agent/weights.py", "etc_agent/worker/change/modes/"),
    "rounds": ("etc_agent/planner/", "etc_agent/migration/", "etc_agent/simulator/", "launcher/ctl/planning/"),
    "bell": ("etc_agent/migration/",),
    "parcel": ("etc_agent/migration/memory/",),
    "crew": ("etc_agent/worker/change/",),
}
"""Parts of identifiers that stand for one thing, and the only places where that thing is."""


PUBLIC = {"verify_variable"}
"""Names after what users type, which stay: ETC_VERIFY."""

CODE = [path for room in ("etc_agent", "launcher") for path in sorted((ROOT / room).rglob("*.py"))]
PROSE = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", *sorted((ROOT / "configs").glob("*.yaml"))]


def _glossary() -> list[str]:
    section = (ROOT / "docs/architecture.md").read_text().split("## Words", 1)[1].split("\n## ", 1)[0]
    rows = [line.split("|")[1].strip() for line in section.splitlines() if line.startswith("| ")]
    return [row for row in rows if row != "term" and not row.startswith("---")]


@pytest.mark.parametrize("word", RETIRED)
def test_a_retired_word_does_not_come_back(word: str) -> None:
    pattern = re.compile(rf"\b{word.replace(' ', '[ _]')}(s|es)?\b", re.IGNORECASE)
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}" for path in (*CODE, *PROSE)
        for number, line in enumerate(path.read_text().splitlines(), 1) if pattern.search(line)
    ]
    assert not found, f"write {RETIRED[word]} instead of {word!r}:\n" + "\n".join(found)


@functools.cache
def _identifiers() -> dict[str, set[str]]:
    """File -> the names in it, in lower case with underscores."""
    return {
        str(path.relative_to(ROOT)): {
            re.sub("([a-z])([A-Z])", r"\1_\2", name).lower()
            for node in ast.walk(ast.parse(path.read_text())) for field in ("id", "attr", "name", "arg")
            if isinstance(name := getattr(node, field, None), str)
        }
        for path in CODE
    }


@pytest.mark.parametrize("word", ROOMS_OF)
def test_a_word_of_one_thing_names_nothing_elsewhere(word: str) -> None:
    pattern = re.compile(rf"(?<![a-z]){word}s?(?![a-z])")
    elsewhere = sorted(
        f"{file}: {name}" for file, names in _identifiers().items() if not file.startswith(ROOMS_OF[word])
        for name in names if pattern.search(name) and name not in PUBLIC
    )
    assert not elsewhere, f"{word!r} has one meaning, which belongs to {ROOMS_OF[word]}: {elsewhere}"


def test_every_term_of_the_glossary_is_used_by_the_code() -> None:
    text = re.sub(r"[\s_]+", " ", "\n".join(path.read_text() for path in CODE)).lower()
    terms = _glossary()
    assert terms
    assert not [term for term in terms if term not in text]
