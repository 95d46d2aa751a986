"""When a request that etcd refused is tried again, and how often that is logged. Pure: the caller passes the time."""

from __future__ import annotations

from dataclasses import dataclass

from etc_agent.rendezvous.etcd.errors import EtcdError, EtcdUnavailable


@dataclass(slots=True)
class Attempts:
    """The attempts at one thing. `first_s`, `longest_s`: the wait after the first refusal, which doubles up to the
    longest. After an attempt without an answer there is no wait, since the attempt itself has taken its timeout."""

    first_s: float = 0.5
    longest_s: float = 10.0
    _wait_s: float = 0.0
    _due_at: float = float("-inf")
    _said: str = ""

    def are_due(self, now: float) -> bool:
        """Whether to try (again) at time `now`, in seconds of a monotonic clock."""
        return now >= self._due_at

    def failed(self, now: float, error: EtcdError) -> bool:
        """Record a failure; returns whether it differs from the last one, so that it should be logged."""
        if isinstance(error, EtcdUnavailable):
            self._wait_s = 0.0
        else:
            self._wait_s = min(max(self.first_s, 2 * self._wait_s), self.longest_s)
        self._due_at = now + self._wait_s
        is_news, self._said = str(error) != self._said, str(error)
        return is_news

    def succeeded(self) -> bool:
        """Record the success; returns whether there were failures before, so that it should be logged."""
        has_failed = self._said != ""
        self._wait_s, self._due_at, self._said = 0.0, float("-inf"), ""
        return has_failed
