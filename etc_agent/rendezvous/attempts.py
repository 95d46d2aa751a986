"""When something that etcd refused is tried again, and how often that is said. Pure: times are given."""

from __future__ import annotations

from dataclasses import dataclass

from etc_agent.rendezvous.etcd.errors import EtcdError, EtcdUnavailable


@dataclass(slots=True)
class Attempts:
    """The attempts at one thing. `first_s`, `longest_s`: the wait after the first refusal, which doubles up to the
    longest. After an attempt that nobody answered there is none, since it has taken its time already."""

    first_s: float = 0.5
    longest_s: float = 10.0
    _wait_s: float = 0.0
    _due_at: float = float("-inf")
    _said: str = ""

    def are_due(self, now: float) -> bool:
        """Whether to try (again) at `now`, in seconds of a clock that never goes back."""
        return now >= self._due_at

    def failed(self, now: float, error: EtcdError) -> bool:
        """Take note of a failure; whether it is another than the last one, so that people should hear of it."""
        if isinstance(error, EtcdUnavailable):
            self._wait_s = 0.0
        else:
            self._wait_s = min(max(self.first_s, 2 * self._wait_s), self.longest_s)
        self._due_at = now + self._wait_s
        is_news, self._said = str(error) != self._said, str(error)
        return is_news

    def succeeded(self) -> bool:
        """It is done; whether it had failed before, so that people should hear of that."""
        has_failed = self._said != ""
        self._wait_s, self._due_at, self._said = 0.0, float("-inf"), ""
        return has_failed
