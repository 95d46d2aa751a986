"""The protocol by which two agents exchange their status: one line of JSON each, over one TCP connection.

The agent that was called sends first, then the caller. So each has a time on its own clock at which, or after which,
the other's status was true: for the caller when it began to connect, for the other agent when it sent.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from etc_agent.reconfig.fencing import PeerStatus

LONGEST_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Speaker:
    """The sender of a status. `job`: the job's incarnation; lines of other jobs are ignored. `node`: its node's
    name."""

    job: str
    node: str

    def encode(self, status: PeerStatus) -> bytes:
        """The line with this node's `status`."""
        said = {
            "job": self.job, "node": self.node, "followed_s": status.followed_s, "has_workers": status.has_workers,
            "step": status.step,
        }
        return json.dumps(said).encode() + b"\n"

    def decode(self, line: bytes, at: float) -> tuple[str, PeerStatus] | None:
        """The sending node, and its status as of `at`; None where the line is not from another node of this job."""
        try:
            said = json.loads(line)
            if said["job"] != self.job or said["node"] == self.node:
                return None
            followed_s, step = max(0.0, float(said["followed_s"])), said.get("step")
            return str(said["node"]), PeerStatus(at, followed_s, bool(said["has_workers"]), step and int(step))
        except (ValueError, TypeError, KeyError, RecursionError):
            return None
