"""The TCP ports that an agent may listen at, for hosts behind a firewall."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

_FORM = re.compile(r"([0-9]{1,5})-([0-9]{1,5})")
LEAST = 8
"""Ports that one agent may need: its contact point, and stores of the present generation and of earlier ones."""


@dataclass(frozen=True, slots=True)
class PortRange:
    """The ports from `first` to `last`, both included. The range 0 to 0 stands for any free port."""

    first: int
    last: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``29500-29599``.

        Raises:
            ValueError: one line: what was given, and what is expected.
        """
        match = _FORM.fullmatch(text.strip())
        ports = cls(int(match[1]), int(match[2])) if match else None
        if ports is None or not 1 <= ports.first <= ports.last <= 65535:
            raise ValueError(f"{text!r} is no range of ports; write it like 29500-29599")
        if len(ports) < LEAST:
            raise ValueError(f"{text!r} has {len(ports)} ports; each etc-run on a host needs {LEAST}")
        return ports

    def __len__(self) -> int:
        return self.last - self.first + 1

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.first, self.last + 1))

    def __str__(self) -> str:
        return f"{self.first}-{self.last}"


ANY_PORT = PortRange(0, 0)
