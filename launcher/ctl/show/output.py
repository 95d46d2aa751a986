"""The one place where commands write their answer: as text for people, or as JSON for programs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any

import click
from rich.console import RenderableType

from launcher.ctl.show.tables import console


@dataclasses.dataclass(frozen=True, slots=True)
class Output:
    """Standard output in one `form`, ``text`` or ``json``."""

    form: str

    def show(self, value: Any, text: Callable[[], RenderableType]) -> None:
        """One answer: `value` as one JSON object, or what `text` returns for people."""
        if self.form == "json":
            click.echo(json.dumps(plain(value)))
        else:
            _print(text())

    def show_all(self, values: Iterable[Any], text: Callable[[], RenderableType]) -> None:
        """A list: one JSON object a line, or what `text` returns for people."""
        if self.form == "json":
            for value in values:
                click.echo(json.dumps(plain(value)))
        else:
            _print(text())


def _print(text: RenderableType) -> None:
    if isinstance(text, str):
        click.echo(text)
    else:
        console().print(text)


def plain(value: Any) -> Any:
    """`value` as JSON values: dataclasses by field, enums by value, everything else that JSON lacks as text."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        if hasattr(value, "to_json"):
            return plain(value.to_json())
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)
