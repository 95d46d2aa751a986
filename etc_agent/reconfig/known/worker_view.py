"""One worker as its agent sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from etc_agent.control.messages import FirstStep, Frozen, PeerLost, Prepared, Refused, Switched
from etc_agent.reconfig.known.records import Failure


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker process of this node, in slot `index`, started for generation `started_for`.

    `exit_code`: None while it runs. `in_session`: it has sent Hello. `began_at`: the first step of the generation that
    it was started for. `told`: messages already sent to it, by type and generation. `is_plain`: it runs no session and
    never will. `has_stepped`: it has completed a training step. `has_closed`: it has closed its session in order. The
    messages of the worker itself are by
    generation, those in `frozen` by the number of the loss.
    """

    index: int
    started_for: int
    in_session: bool = False
    began_at: int = 0
    is_plain: bool = False
    has_stepped: bool = False
    has_closed: bool = False
    exit_code: int | None = None
    failure: Failure | None = None
    told: frozenset[tuple[str, int]] = frozenset()
    prepared: Mapping[int, Prepared] = field(default_factory=dict)
    refused: Mapping[int, Refused] = field(default_factory=dict)
    switched: Mapping[int, Switched] = field(default_factory=dict)
    first_step: Mapping[int, FirstStep] = field(default_factory=dict)
    frozen: Mapping[int, Frozen] = field(default_factory=dict)
    peer_lost: Mapping[int, PeerLost] = field(default_factory=dict)

    @property
    def is_running(self) -> bool:
        return self.exit_code is None
