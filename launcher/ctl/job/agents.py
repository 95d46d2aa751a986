"""What the agents of a job say of themselves when they are asked directly, at their contact points.

Nobody writes a step to etcd for each node, so that a job of any size stays quiet there. Reached are only the nodes that
this host can connect to.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping

from etc_agent.agent.safety.peer_status import LONGEST_BYTES, Speaker
from etc_agent.reconfig.fencing import PeerStatus
from etc_agent.reconfig.known.records import NodeRecord

_AT_ONCE = 200


def ask_agents(incarnation: str, nodes: Iterable[NodeRecord], timeout_s: float) -> Mapping[str, PeerStatus]:
    """Node -> its agent's status, for those that answer within `timeout_s` and belong to this run of the job."""
    return asyncio.run(_ask(incarnation, list(nodes), timeout_s))


async def _ask(incarnation: str, nodes: list[NodeRecord], timeout_s: float) -> Mapping[str, PeerStatus]:
    free = asyncio.Semaphore(_AT_ONCE)

    async def one(node: NodeRecord) -> tuple[str, PeerStatus] | None:
        async with free:
            return await _status(incarnation, node, timeout_s)

    answers = await asyncio.gather(*(one(node) for node in nodes if node.contact_port))
    return dict(answer for answer in answers if answer is not None)


async def _status(incarnation: str, node: NodeRecord, timeout_s: float) -> tuple[str, PeerStatus] | None:
    try:
        async with asyncio.timeout(timeout_s):
            asked_at = time.monotonic()
            reader, writer = await asyncio.open_connection(node.address, node.contact_port, limit=LONGEST_BYTES)
            try:
                answer = Speaker(incarnation, "").decode(await reader.readline(), asked_at)
            finally:
                writer.close()
    except (OSError, TimeoutError, ValueError):
        return None
    return answer if answer is not None and answer[0] == node.name else None
