"""Serves `samples` over HTTP: ``/metrics`` for Prometheus, ``/healthz`` and ``/readyz`` for whoever runs the node."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import make_wsgi_app
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from etc_agent.agent.telemetry.facts import NodeFacts
from etc_agent.agent.telemetry.samples import Family, Kind, families, not_ready
from etc_agent.errors import EtcError
from etc_agent.reconfig.known.observing import JobRecords
from etc_agent.reconfig.past.account import Distribution

HEALTHY_S = 60.0
"""Seconds that the agent's loop may take for one turn. Far longer than any wait of its own, since a supervisor that
takes an agent for dead ends its workers with it."""
_CLIENT_S = 10.0
"""Seconds that a client may take to send its request."""


class Exporter:
    """Listens from the start. `observe` gives it what to show; until then the node is healthy and not ready.

    Raises:
        EtcError: the address cannot be listened at.
    """

    def __init__(self, host: str, port: int) -> None:
        self._seen: tuple[JobRecords, NodeFacts] | None = None
        self._turned_at = time.monotonic()
        registry = CollectorRegistry()
        registry.register(_Families(self))
        self._metrics = make_wsgi_app(registry)
        server_class = _Server6 if ":" in host else _Server
        try:
            self._server = make_server(host, port, self._answer, server_class, _Handler)
        except (OSError, OverflowError) as error:
            raise EtcError(f"--metrics-port: cannot listen at {host}:{port}: {error}") from None
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """``host:port``, as in a URL."""
        host, port = self._server.server_address[:2]
        return f"[{host!s}]:{port}" if ":" in str(host) else f"{host!s}:{port}"

    def observe(self, records: JobRecords, facts: NodeFacts) -> None:
        """Show these from now on. Called once a turn of the agent's loop."""
        self._seen, self._turned_at = (records, facts), time.monotonic()

    def close(self) -> None:
        """Stop listening. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def families(self) -> tuple[Family, ...]:
        return families(*self._seen) if self._seen else ()

    def _answer(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        match environ["PATH_INFO"]:
            case "/metrics":
                return self._metrics(environ, start_response)
            case "/healthz":
                why = self._not_healthy()
            case "/readyz":
                why = self._not_healthy() or (not_ready(*self._seen) if self._seen else "this node is starting")
            case _:
                start_response("404 Not Found", [("Content-Type", "text/plain")])
                return [b"/metrics, /healthz or /readyz\n"]
        start_response("503 Service Unavailable" if why else "200 OK", [("Content-Type", "text/plain")])
        return [f"{why or 'ok'}\n".encode()]

    def _not_healthy(self) -> str:
        still_s = time.monotonic() - self._turned_at
        return f"the agent's loop has not turned for {still_s:.0f} s" if still_s > HEALTHY_S else ""


class _Families(Collector):
    """What the exporter shows, in prometheus_client's own classes."""

    def __init__(self, exporter: Exporter) -> None:
        self._exporter = exporter

    def collect(self) -> Iterator[Metric]:
        return map(_metric, self._exporter.families())


def _metric(family: Family) -> Metric:
    labels = list(family.samples[0].labels) if family.samples else []
    metric: Metric
    match family.kind:
        case Kind.GAUGE:
            metric = gauge = GaugeMetricFamily(family.name, family.help, labels=labels)
            for sample in family.samples:
                assert not isinstance(sample.value, Distribution)
                gauge.add_metric(list(sample.labels.values()), float(sample.value))
        case Kind.COUNTER:
            metric = counter = CounterMetricFamily(family.name, family.help, labels=labels)
            for sample in family.samples:
                assert not isinstance(sample.value, Distribution)
                counter.add_metric(list(sample.labels.values()), float(sample.value))
        case Kind.HISTOGRAM:
            metric = histogram = HistogramMetricFamily(family.name, family.help, labels=labels)
            for sample in family.samples:
                assert isinstance(sample.value, Distribution)
                bounds = [(floatToGoString(bound), count) for bound, count in sample.value.cumulative]
                histogram.add_metric(list(sample.labels.values()), bounds, sample.value.sum_s)
    return metric


class _Server(ThreadingMixIn, WSGIServer):
    """A client that takes its time does not keep others waiting, nor the agent from ending."""

    daemon_threads = True


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    timeout = _CLIENT_S

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: a scrape is no news."""
