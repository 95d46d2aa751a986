"""What two agents say to each other directly: one line of JSON each, over a TCP connection that is closed after it.

The agent that was called speaks first, then the caller. So each knows a moment that is not after what the other says
was true: for the caller the moment it began to connect, for the other one the moment it spoke.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from etc_agent.reconfig.fencing import PeerStatus

LONGEST_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Speaker:
    """`job`: the incarnation of the job; what another job's agents say is ignored. `node`: the name of its node."""

    job: str
    node: str

    def encode(self, status: PeerStatus) -> bytes:
        """The line that says `status` of this speaker's node."""
        said = {"job": self.job, "node": self.node, "followed_s": status.followed_s, "has_workers": status.has_workers}
        return json.dumps(said).encode() + b"\n"

    def decode(self, line: bytes, at: float) -> tuple[str, PeerStatus] | None:
        """The node that spoke, and its status as of `at`; None where it is nothing that a peer of this job says."""
        try:
            said = json.loads(line)
            if said["job"] != self.job or said["node"] == self.node:
                return None
            return str(said["node"]), PeerStatus(at, max(0.0, float(said["followed_s"])), bool(said["has_workers"]))
        except (ValueError, TypeError, KeyError, RecursionError):
            return None
