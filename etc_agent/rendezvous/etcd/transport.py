"""Sends one request to an etcd member and returns its answer: channels, failover, deadlines, the auth token.

Every attempt has its own deadline within the caller's total budget, so that a member which hangs without closing its
connection costs seconds, not the whole budget. A request that failed to connect, timed out or was refused because there
is no etcd leader is tried on the next endpoint.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etc_agent.rendezvous.etcd.errors import (
    AmbiguousError,
    ClientClosedError,
    EtcdError,
)
from etc_agent.rendezvous.etcd.quiet_grpc import grpc
from etc_agent.rendezvous.etcd.reasons import (
    is_worth_another_endpoint,
    refusal,
    shorten,
    speaks_of_token,
    unavailable,
    was_not_applied,
)
from etc_agent.rendezvous.etcd.wire import MESSAGES, message, serialize

ATTEMPT_S = 2.0
_FIRST_DELAY_S = 0.02
_LONGEST_DELAY_S = 0.5

_CHANNEL_OPTIONS = [
    # etcd ends connections that ping more often than every 5 s; ping_timeout is what makes a dead link fail (without
    # it 64 s were measured, with it 7 s).
    ("grpc.keepalive_time_ms", 6000),
    ("grpc.keepalive_timeout_ms", 3000),
    ("grpc.http2.ping_timeout_ms", 3000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Also how long one attempt to connect may take: TLS needs four round trips.
    ("grpc.min_reconnect_backoff_ms", 3000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
    # Two clients of one process must not share a connection: one may be closed without the other.
    ("grpc.use_local_subchannel_pool", 1),
]


@dataclass(frozen=True, slots=True)
class Method:
    """One remote procedure. Of a streaming one, `call` sends one request and takes the first answer."""

    path: str
    response: str
    is_streaming: bool = False


AUTHENTICATE = Method("/etcdserverpb.Auth/Authenticate", "AuthenticateResponse")


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM files: the certificate authority to trust (None: the system's), and our own certificate and key if etcd asks
    for one."""

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise EtcdError("an etcd client certificate needs a certificate file and a key file; only one was given")

    def credentials(self) -> grpc.ChannelCredentials:
        def read(path: Path | None, what: str) -> bytes | None:
            if path is None:
                return None
            try:
                return Path(path).read_bytes()
            except OSError as error:
                raise EtcdError(f"cannot read the etcd {what} file {path}: {error.strerror}") from None

        return grpc.ssl_channel_credentials(
            read(self.ca, "CA certificate"), read(self.key, "client key"), read(self.certificate, "client certificate")
        )


@dataclass(frozen=True, slots=True)
class Link:
    """The endpoint chosen for one attempt, and the token sent with it."""

    position: int
    channel: grpc.Channel
    token: str | None


def parse_endpoint(endpoint: str) -> tuple[str, bool]:
    """"host:port", "http(s)://host:port" or "unix:///path" -> (what grpc connects to, whether the scheme asks for TLS).

    Raises:
        EtcdError: it is none of these.
    """
    address, is_https = endpoint.strip(), False
    if address.startswith("unix:///"):
        return address, False
    for scheme in ("http://", "https://"):
        if address.startswith(scheme):
            address, is_https = address.removeprefix(scheme), scheme == "https://"
    address = address.rstrip("/")
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise EtcdError(f"etcd endpoint {endpoint!r} is not host:port, such as 127.0.0.1:2379, nor unix:///path")
    return address, is_https


class Transport:
    """Requests over the endpoints of one etcd cluster. Safe to use from several threads."""

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        tls: Tls | None = None,
        user: str | None = None,
        password: str | None = None,
        timeout_s: float = 5.0,
    ) -> None:
        if not endpoints:
            raise EtcdError("no etcd endpoint was given; name at least one as host:port, such as 127.0.0.1:2379")
        if user is not None and password is None:
            raise EtcdError(f"etcd user {user!r} was given without a password")
        parsed = [parse_endpoint(endpoint) for endpoint in endpoints]
        self.addresses = tuple(address for address, _ in parsed)
        if tls is None and any(is_https for _, is_https in parsed):
            tls = Tls()
        self.timeout_s = timeout_s
        self._credentials = tls.credentials() if tls else None
        self._user, self._password = user, password
        self._lock = threading.Lock()
        self._channels: dict[str, grpc.Channel] = {}
        # Clients spread over the members; each stays with one while it answers.
        self._position = random.randrange(len(self.addresses))
        self._token: str | None = None
        self._closed = threading.Event()

    @property
    def is_closed(self) -> bool:
        return self._closed.is_set()

    def sleep(self, seconds: float) -> None:
        """Wait, with jitter, or less when the transport is closed."""
        self._closed.wait(seconds * (0.5 + random.random()))

    def call(self, method: Method, request: Any, *, is_repeatable: bool = True, timeout_s: float | None = None) -> Any:
        """Send `request`, trying endpoints until one answers.

        is_repeatable: whether sending the request twice does no harm. If it does, an attempt that may have reached etcd
            is
        not repeated.

        Raises:
            EtcdUnavailable: nobody answered within timeout_s.
            AmbiguousError: not repeatable, and it may have been applied.
            EtcdAuthError, EtcdError: etcd refused it.
        """
        budget_s = self.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + budget_s
        delay_s = _FIRST_DELAY_S
        while True:
            link = self.link(deadline) if method is not AUTHENTICATE else self._link_without_token()
            try:
                return self._attempt(link, method, request, min(ATTEMPT_S, max(0.05, deadline - time.monotonic())))
            except grpc.RpcError as error:
                self._check_open()
                reason = self.failed(link, error)
                if not is_repeatable and not was_not_applied(reason):
                    raise AmbiguousError(
                        f"etcd was asked to apply a transaction and did not answer ({shorten(reason)}); "
                        "it may or may not have been applied"
                    ) from None
            except ValueError:  # grpc raises it if the channel was closed meanwhile
                self._check_open()
                raise
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                raise unavailable(self.addresses, budget_s, reason, uses_tls=self._credentials is not None)
            self.sleep(min(delay_s, remaining_s))
            delay_s = min(_LONGEST_DELAY_S, 2 * delay_s)

    def open_stream(
        self, link: Link, method: Method, requests: Iterator[Any], metadata: Sequence[tuple[str, str]]
    ) -> Any:
        """A bidirectional stream over `link`: an iterator of answers with `cancel()`. Failures are raised as
        grpc.RpcError by the iterator; pass them to `failed`."""
        stream = link.channel.stream_stream(
            method.path, request_serializer=serialize, response_deserializer=MESSAGES[method.response].FromString
        )
        return stream(requests, metadata=[*metadata, *_token_metadata(link)])

    def link(self, deadline: float) -> Link:
        """The current endpoint, with a valid token when there is a user. `deadline` is in time.monotonic() seconds."""
        link = self._link_without_token()
        if self._user is None:
            return link
        with self._lock:
            token = self._token
        if token is None:
            request = message("AuthenticateRequest", name=self._user, password=self._password)
            answer = self.call(AUTHENTICATE, request, timeout_s=max(0.05, deadline - time.monotonic()))
            with self._lock:
                self._token = token = answer.token
            link = self._link_without_token()
        return Link(link.position, link.channel, token)

    def failed(self, link: Link, error: grpc.RpcError) -> str:
        """Handle a failed attempt: use another endpoint or another token next time.

        Returns: etcd's or grpc's reason, where trying again makes sense.
        Raises:
            EtcdError: it does not.
        """
        code, reason = error.code(), error.details() or ""
        if speaks_of_token(reason) and self._user is not None:
            self.forget_token(link)
        elif is_worth_another_endpoint(code, reason):
            self.go_to_next_endpoint(link)
        elif "too many requests" not in reason:
            raise refusal(code, reason, self._user)
        return reason

    def go_to_next_endpoint(self, link: Link) -> None:
        with self._lock:
            if self._position == link.position:  # else another thread has already moved on
                self._position += 1

    def forget_token(self, link: Link) -> None:
        """The next link gets a new token."""
        with self._lock:
            if self._token == link.token:
                self._token = None

    def close(self) -> None:
        """End every call and stream. Idempotent."""
        self._closed.set()
        with self._lock:
            channels, self._channels = self._channels, {}
        for channel in channels.values():
            channel.close()

    def _link_without_token(self) -> Link:
        with self._lock:
            self._check_open()
            address = self.addresses[self._position % len(self.addresses)]
            channel = self._channels.get(address)
            if channel is None:
                channel = (
                    grpc.secure_channel(address, self._credentials, _CHANNEL_OPTIONS)
                    if self._credentials
                    else grpc.insecure_channel(address, _CHANNEL_OPTIONS)
                )
                self._channels[address] = channel
            return Link(self._position, channel, None)

    def _attempt(self, link: Link, method: Method, request: Any, timeout_s: float) -> Any:
        parse = MESSAGES[method.response].FromString
        metadata = _token_metadata(link)
        if not method.is_streaming:
            unary = link.channel.unary_unary(method.path, request_serializer=serialize, response_deserializer=parse)
            return unary(request, timeout=timeout_s, metadata=metadata)
        stream = link.channel.stream_stream(method.path, request_serializer=serialize, response_deserializer=parse)
        answers = stream(iter([request]), timeout=timeout_s, metadata=metadata)
        try:
            for answer in answers:
                return answer
        finally:
            answers.cancel()
        raise EtcdError(f"etcd ended {method.path} without an answer")

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise ClientClosedError("this etcd client has been closed")


def _token_metadata(link: Link) -> list[tuple[str, str]]:
    return [("token", link.token)] if link.token else []
