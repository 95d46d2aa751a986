"""Whether workers keep copies of each other's state in memory, and how often; from the job file to every worker."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Self

REDUNDANCY_VARIABLE: Final = "ETC_REDUNDANCY"


class Scheme(StrEnum):
    """`PEER`: state without a replica is copied into the memory of a worker on another node. `PARITY`: the XOR of it is
    kept, over a group of workers on different nodes."""

    NONE = "none"
    PEER = "peer"
    PARITY = "parity"


@dataclass(frozen=True, slots=True)
class Redundancy:
    """`every`: steps from one set of copies to the next. In the environment of a worker it is written ``peer:10``."""

    scheme: Scheme = Scheme.NONE
    every: int = 10

    def __str__(self) -> str:
        return f"{self.scheme}:{self.every}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Inverse of `str`.

        Raises:
            ValueError: it is not of that form.
        """
        scheme, _, every = text.partition(":")
        if scheme not in list(Scheme) or not every.isdigit() or int(every) < 1:
            raise ValueError(f"{text!r} is no redundancy; write it like {Redundancy(Scheme.PEER)}")
        return cls(Scheme(scheme), int(every))
