"""What a loss means to the main thread: to wait, at the session's next entrance, for what all survivors agree on."""

from __future__ import annotations

import logging
from collections.abc import Callable

from etc_agent.control.causes import ErrorKind, kind_of
from etc_agent.control.messages import Agreed, Message, PeerLost
from etc_agent.errors import EtcError, one_line
from etc_agent.worker.loss.latch import Latch

_log = logging.getLogger(__name__)

CONSEQUENCES = (ErrorKind.PEER_LOST, ErrorKind.UNCLEAR)


class StepRetriedError(BaseException):
    """The step under way is run again in the next generation. It passes through the script's ``except Exception``, and
    ends at its ``with step``."""


class FrozenWait:
    """Waits for the agent's word on a loss. `timeout_s`: how long after an error of a peer's kind; `is_over`: whether
    the agent is gone."""

    def __init__(
        self, latch: Latch, send: Callable[[Message], None], is_over: Callable[[], bool], timeout_s: float
    ) -> None:
        self._latch = latch
        self._send = send
        self._is_over = is_over
        self._timeout_s = timeout_s

    def is_confirmed(self, error: BaseException, step: int) -> bool:
        """Whether `error`, which a step or a vote has ended with, is the consequence of a loss. Where that is possible
        but not known yet, the agent is told, and given time to find the loss."""
        kind = kind_of(error)
        if self._latch.is_closed:
            # What has been cut may show as an error of any native call.
            return kind in CONSEQUENCES or type(error) is RuntimeError
        if kind not in CONSEQUENCES or not isinstance(error, Exception):
            return False
        reason = one_line(error)
        _log.warning("an operation with other workers has failed: %s; the agent is asked whether one is lost", reason)
        self._send(PeerLost(self._latch.seen.generation, step, reason, kind))
        if self._latch.await_closed(self._timeout_s, self._is_over):
            return True
        if self._is_over():
            _log.error("the agent is gone, so nobody says whether a worker was lost; this worker ends")
        else:
            _log.error("no loss of a worker was found within %g s (loss_timeout_s)", self._timeout_s)
        return False

    def agreed(self) -> Agreed:
        """What the survivors of the loss that has closed the latch have agreed on. How long they may take is for the
        agents to say.

        Raises:
            EtcError: the agent is gone.
        """
        agreed = self._latch.await_agreed(self._is_over)
        if agreed is None:
            raise EtcError("workers were lost, and the agent ended before the others had agreed on how to go on")
        return agreed
