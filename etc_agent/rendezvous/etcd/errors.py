"""The errors of the etcd client. Each is one line that a person can act on."""

from __future__ import annotations

from etc_agent.errors import EtcError


class EtcdError(EtcError):
    """etcd refused a request, or did not answer it."""


class EtcdUnavailable(EtcdError):
    """No endpoint answered in time. As far as is known, nothing was written."""


class AmbiguousError(EtcdUnavailable):
    """A transaction was sent and its answer was lost: it may or may not have been applied. Read again, then decide."""


class EtcdAuthError(EtcdError):
    """User, password, certificate or permission was not accepted."""


class ClientClosedError(EtcdError):
    """The client was closed by its owner; there is nothing to wait for."""


class LeaseLostError(EtcdError):
    """The lease does not exist any more, and with it every key that was written under it."""


class NameTakenError(EtcdError):
    """Another live instance has registered this name."""


class FencedError(EtcdError):
    """This process is not the leader any more, or `current` has changed: nothing was written."""
