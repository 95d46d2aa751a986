"""The failures of etcd and grpc by their texts and status codes, and what they mean."""

from __future__ import annotations

from collections.abc import Sequence

from etc_agent.rendezvous.etcd.errors import EtcdAuthError, EtcdError, EtcdUnavailable
from etc_agent.rendezvous.etcd.quiet_grpc import grpc

_NOT_APPLIED = (
    "failed to connect to all addresses",
    "DNS resolution failed",
    "invalid auth token",
    "revision of auth store is old",
    "too many requests",
)

_NO_CLIENT_CERTIFICATE = "it does not accept our TLS client certificate, or misses one"

# (is TLS in use, sign in grpc's words, what it means)
_TLS_HINTS = (
    (True, "CERTIFICATE_VERIFY_FAILED", "its certificate is not signed by the CA that we were told to trust"),
    (True, "TSI_DATA_CORRUPTED", _NO_CLIENT_CERTIFICATE),
    (True, "_ALERT_", _NO_CLIENT_CERTIFICATE),
    (True, "security handshaker", "a TLS file that we were given holds no usable certificate or key"),
    (True, "Handshake read failed", "it seems not to speak TLS, and we do"),
    (True, "WRONG_VERSION_NUMBER", "it seems not to speak TLS, and we do"),
    (False, "Socket closed", "it may speak TLS, which we were not told to use"),
)


def was_not_applied(reason: str) -> bool:
    """Whether a request that failed like this certainly did not change etcd."""
    return any(sign in reason for sign in _NOT_APPLIED)


def speaks_of_token(reason: str) -> bool:
    """Whether the auth token caused the failure, so that a new token may help."""
    return "invalid auth token" in reason or "revision of auth store is old" in reason


def shorten(reason: str) -> str:
    """The informative end of grpc's long messages, on one line."""
    last = " ".join(reason.rpartition("last error: ")[2].split())
    return last[:160] or "no reason given"


def is_worth_another_endpoint(code: grpc.StatusCode, reason: str) -> bool:
    """Whether the endpoint failed, rather than etcd refusing the request."""
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        return True
    # These codes are used when a connection breaks at a bad moment, and also for some of etcd's refusals.
    is_broken = code in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.CANCELLED)
    return is_broken and not reason.startswith(("etcdserver:", "auth:"))


def unavailable(addresses: Sequence[str], tried_s: float, reason: str, *, uses_tls: bool) -> EtcdUnavailable:
    hint = next((hint for tls, sign, hint in _TLS_HINTS if tls is uses_tls and sign in reason), None)
    return EtcdUnavailable(
        f"etcd does not answer at {', '.join(addresses)} (tried for {tried_s:g} s: {shorten(reason)}); "
        + (hint or "is it running, and is the address right?")
    )


def refusal(code: grpc.StatusCode, reason: str, user: str | None) -> EtcdError:
    who = "a client that names no user" if user is None else f"user {user!r}"
    plain = reason.removeprefix("etcdserver: ")
    if "user name is empty" in reason:
        return EtcdAuthError("etcd wants a user and a password, and none was given")
    if "authentication failed" in reason:
        return EtcdAuthError(f"etcd does not accept the password of {who}")
    if "authentication is not enabled" in reason:
        return EtcdAuthError(f"etcd has authentication switched off, yet {who} was given; leave the user out")
    if code is grpc.StatusCode.PERMISSION_DENIED:
        return EtcdAuthError(f"etcd does not let {who} do this ({plain}); grant the role read and write on our prefix")
    if "space exceeded" in reason:
        return EtcdError(
            "etcd is full (database space exceeded) and takes nothing new until somebody makes room: "
            "etcdctl compact REVISION, etcdctl defrag, then etcdctl alarm disarm"
        )
    return EtcdError(f"etcd refused the request: {plain or code.name}")
