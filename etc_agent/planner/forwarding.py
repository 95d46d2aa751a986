"""Sources when several workers need the same box: receivers forward what they have received.

When dp grows by k replicas, a plan without forwarding sends every box k times from the old holders. Here each box is
cut into chunks, and each chunk travels along a tree: the first receiver (a different one for each chunk) gets it from a
holder, each later one from the worker that has the chunk and has sent least. With one holder that is a pipelined chain
per chunk with rotated starts, that is scatter-allgather: no worker sends much more than one copy.
"""

from __future__ import annotations

from etc_agent.planner.coverage import Coverage, Need
from etc_agent.planner.loads import Links
from etc_agent.planner.plan import Transfer
from etc_agent.state.algebra import split_box
from etc_agent.state.boxes import Box
from etc_agent.state.layout import LogicalTensor

CHUNK_BYTES = 1 << 20
"""Smaller needs are not cut to balance the load: a further message would cost more than it saves."""


def forward(coverage: Coverage, round_bytes: int, links: Links) -> list[Transfer]:
    """One source for each chunk of each need; a forwarded chunk comes after the transfer that brings it."""
    node_of, port_of, speed = links.node_of, links.port_of, links.bytes_per_s
    sent = [0] * len(node_of)
    busy_s = [0.0] * len(speed)
    transfers: list[Transfer] = []
    rotation = 0

    def send(tensor: LogicalTensor, box: Box, need: Need, have: dict[int, Need | None]) -> None:
        home, size = node_of[need.target], box.num_elements * tensor.itemsize

        def after(worker: int) -> tuple[float, int]:
            port = port_of[worker]
            return (0.0 if node_of[worker] == home else busy_s[port] + size / speed[port], sent[worker])

        source = min([worker for worker in have if node_of[worker] == home] or have, key=after)
        sent[source] += size
        if node_of[source] != home:
            busy_s[port_of[source]] += size / speed[port_of[source]]
        through = have[source]
        source_box = need.source_box(source) if through is None else through.target_box
        transfers.append(
            Transfer(source, need.target, tensor, box, source_box, need.target_box, forwarded=through is not None)
        )
        have[need.target] = need

    for tensor, index in coverage.tensors:
        groups: dict[tuple[Box, tuple[int, ...]], list[Need]] = {}
        for need in coverage.patterns[index].needs:
            groups.setdefault((need.box, need.holders), []).append(need)
        for needs in groups.values():
            size, ways = needs[0].box.num_elements * tensor.itemsize, len(needs) + len(needs[0].holders) - 1
            share = min(round_bytes, max(CHUNK_BYTES, -(-size // ways)))
            for box in split_box(needs[0].box, max(1, share // tensor.itemsize)):
                have: dict[int, Need | None] = dict.fromkeys(needs[0].holders)
                start = rotation % len(needs)
                rotation += 1
                for need in (*needs[start:], *needs[:start]):
                    send(tensor, box, need, have)
    return transfers
