"""Whether a run without nodes in etcd still has workers somewhere: its agents may only have lost etcd."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable
from types import TracebackType
from typing import Self

from etc_agent.agent.safety.peer_status import Speaker
from etc_agent.agent.safety.reach import Reach
from etc_agent.reconfig.fencing import NEVER, Fencing, PeerStatus
from etc_agent.reconfig.known.records import Ack


class Survivors:
    """Asks the agents of the run `incarnation` while its `with` block is active. The questions tell them that etcd can
    be reached, so that they stop their workers."""

    def __init__(self, incarnation: str, fencing: Fencing) -> None:
        self._began = time.monotonic()
        self._alive_at = NEVER
        self._fencing = fencing
        self._reach = Reach(
            Speaker(incarnation, f"newcomer-{uuid.uuid4().hex}"), self._own_status, self._heard,
            every_s=fencing.ttl_s / 16, timeout_s=fencing.ttl_s / 8,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._reach.close()

    def ask(self, acks: Iterable[Ack]) -> None:
        """From now on ask the nodes that wrote these."""
        self._reach.want({ack.contact: ack.contact for ack in acks if ack.contact}, {})

    @property
    def gone_in_s(self) -> float:
        """After how many seconds the workers of that run are certainly gone, if no agent says otherwise."""
        return max(self._began, self._alive_at) + self._fencing.trust_s - time.monotonic()

    def _own_status(self) -> PeerStatus:
        return PeerStatus(time.monotonic(), time.monotonic() - self._began)

    def _heard(self, node: str, status: PeerStatus) -> None:
        if status.has_workers:
            self._alive_at = time.monotonic()
