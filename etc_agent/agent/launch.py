"""From settings to exit code: creates everything that one node's agent needs, runs it, and cleans up."""

from __future__ import annotations

import json
import logging
import os
import shlex
import signal
import socket
import sys
import traceback
import uuid
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from etc_agent.agent.admission import admit
from etc_agent.agent.etcd import connect
from etc_agent.agent.inbox import Inbox
from etc_agent.agent.job_end import JobEnd
from etc_agent.agent.node import NodeAgent
from etc_agent.agent.open_files import allow_open_files
from etc_agent.agent.processes.functions import worker_program
from etc_agent.agent.processes.logs import NodeLogs, remove_empty_logs
from etc_agent.agent.processes.programs import Program
from etc_agent.agent.processes.torch_events import TorchEvents
from etc_agent.agent.processes.watchdog import start_watchdog
from etc_agent.agent.safety.guardian import Guardian
from etc_agent.agent.safety.preemption import PreemptionProbe
from etc_agent.agent.safety.preflight import check_node
from etc_agent.agent.safety.signals import (
    SignalReceived,
    Signals,
    deliver,
    dropping,
    heeded,
    ignore,
    interrupting,
    keep_handlers,
    parse_signals,
)
from etc_agent.agent.settings import JobSettings
from etc_agent.agent.stores import Stores
from etc_agent.agent.telemetry import verdict
from etc_agent.agent.telemetry.telemetry import Telemetry
from etc_agent.control.checkpoint_settings import newest_step
from etc_agent.errors import EtcError
from etc_agent.places import socket_folder
from etc_agent.reconfig.fencing import Fencing
from etc_agent.reconfig.known.records import NodeRecord
from etc_agent.rendezvous.addresses import LOOPBACK, node_name, reachable_address
from etc_agent.rendezvous.etcd.client import EtcdClient
from etc_agent.rendezvous.etcd.errors import EtcdUnavailable, NameTakenError
from etc_agent.rendezvous.keys import JobKeys
from etc_agent.rendezvous.membership import Membership
from etc_agent.rendezvous.mirror import Mirror, Snapshot
from etc_agent.rendezvous.private.listen import OnSocket
from etc_agent.rendezvous.private.server import EtcdServer

logger = logging.getLogger(__name__)

_MAX_NAMES = 64


def run_job(settings: JobSettings) -> JobEnd:
    """Run this node's part of the job, and return how it has ended.

    Raises:
        EtcError: it could not start; the message says why in one line.
    """
    file, run_id = settings.telemetry.verdict, settings.run_id
    if file is not None:
        verdict.begin(file, run_id)
    try:
        end = _run(settings)
    except Exception as error:
        may_pass = isinstance(error, EtcdUnavailable)
        verdict.write(file, verdict.Verdict.refused(run_id, error, 1, start_again=may_pass))
        raise
    if file is not None:
        saved = newest_step(settings.checkpoint.folder) if settings.checkpoint else None
        verdict.write(file, verdict.Verdict.of(run_id, end, saved))
    return end


def _run(settings: JobSettings) -> JobEnd:
    _log_to_stderr()
    handled = heeded(parse_signals(settings.launch_config.signals_to_handle))
    forwarded = heeded(settings.forward_signals)
    keep_handlers()
    events = TorchEvents(settings.launch_config, settings.entrypoint)
    try:
        with worker_program(settings) as program, interrupting(handled), dropping(forwarded), ExitStack() as stack:
            guardian = Guardian()
            stack.callback(guardian.close)
            name = node_name(settings.local_addr or socket.gethostname())
            telemetry = stack.enter_context(Telemetry(settings.telemetry, settings.run_id, name))
            end = _assemble(settings, program, stack, handled, forwarded, events, guardian, telemetry).run()
            telemetry.ended(end.exit_code, end.why)
        if end.stopped_by is not None:
            events.agent_broken(f"stopped by a signal; exit code {end.exit_code}")
        else:
            events.agent_ended(is_failed=end.exit_code != 0)
        return end
    except EtcError:
        events.agent_broken(traceback.format_exc())
        raise
    except SignalReceived as received:
        events.agent_broken(f"stopped by {received}")
        logger.error("stopped by %s", received)
        why, again = f"stopped by {received}", received.number != signal.SIGINT
        return JobEnd(128 + received.number, why, received.number, start_again=again)
    finally:
        remove_empty_logs(settings.launch_config.logs_specs, settings.run_id)


def _assemble(
    settings: JobSettings,
    program: Program,
    stack: ExitStack,
    handled: Signals,
    forwarded: Signals,
    events: TorchEvents,
    guardian: Guardian,
    telemetry: Telemetry,
) -> NodeAgent:
    """Create everything in order; `stack` undoes it in reverse order in any case."""
    stack.callback(ignore, handled)
    allow_open_files(settings.num_slots)
    if settings.preflight is not None:
        check_node(settings.preflight, settings.env, guardian)
    run_folder = socket_folder("etc-run-")
    guardian.remove_folder(run_folder)
    etcd = settings.etcd
    if settings.standalone:
        server = stack.enter_context(EtcdServer(listen=OnSocket(run_folder)))
        etcd = replace(etcd, endpoints=(server.endpoint,))
        _announce(settings.run_id, server.endpoint, JobKeys(settings.run_id, etcd.prefix))
    client = stack.enter_context(connect(etcd, settings.timeouts.etcd_s))
    keys = JobKeys(settings.run_id, settings.etcd.prefix)
    incarnation = admit(settings, client, keys)
    inbox = Inbox()
    mirror = Mirror(client, keys.root, inbox.changed)
    stack.callback(mirror.close)
    address = settings.local_addr or (LOOPBACK if settings.standalone else reachable_address(etcd.endpoints))
    stores = Stores(address, settings.port_range)
    record, membership = _register(settings, client, keys, address, stores.port)
    stack.callback(membership.close)
    mirror.wait_for(lambda snapshot: membership.key in snapshot, settings.timeouts.etcd_s)
    if (watchdog := start_watchdog(settings.run_id, run_folder)) is not None:
        stack.callback(watchdog.stop)
    logs = NodeLogs(settings.launch_config.logs_specs, _log_folder(settings), settings.num_slots)
    agent = NodeAgent(
        settings, program, record, client, keys, mirror, membership, guardian, inbox, incarnation, run_folder,
        logs, events, telemetry, stores, _earlier_generation(mirror.snapshot(), keys, membership.key), handled,
    )
    stack.callback(agent.close)
    stack.callback(ignore, handled)
    deliver(handled, inbox.signalled)
    deliver(forwarded, inbox.signalled_for_workers)
    if (preemption := settings.preemption) is not None:
        stack.callback(PreemptionProbe(preemption.probe, preemption.every_s, inbox.preempted, guardian).close)
    return agent


def _announce(run_id: str, endpoint: str, keys: JobKeys) -> None:
    """Print the address of the private etcd and two commands that can be copied to use it."""
    put = shlex.join(["etcdctl", f"--endpoints={endpoint}", "put", keys.scale])
    print(f"etcd: {endpoint} run id: {run_id}", file=sys.stderr)
    print(f"etc-run: to change the number of workers, as this user on this host: {put} 2", file=sys.stderr)
    scale = shlex.join(["etc-ctl", "scale", "2", "--etcd-endpoints", endpoint])
    print(f"etc-run: the same with the answer to it: {scale} --wait", file=sys.stderr, flush=True)


def _register(
    settings: JobSettings, client: EtcdClient, keys: JobKeys, address: str, store_port: int
) -> tuple[NodeRecord, Membership]:
    """Register under a name that no live node has."""
    wanted = node_name(settings.local_addr or socket.gethostname())
    for number in range(1, _MAX_NAMES + 1):
        name = wanted if number == 1 else f"{wanted}-{number}"
        record = NodeRecord(
            name, address, settings.num_slots, store_port, uuid.uuid4().hex,
            rank=settings.node_rank, role=settings.launch_config.role,
        )
        try:
            value = json.dumps(record.to_json())
            return record, Membership(client, keys.node(name), value, ttl_s=Fencing(settings.timeouts.lease_s).ttl_s)
        except NameTakenError:
            continue
    raise EtcError(f"{_MAX_NAMES} nodes are called {wanted}; give each its own with --local-addr")


def _earlier_generation(snapshot: Snapshot, keys: JobKeys, own: str) -> int:
    """The newest generation that existed before this agent: a node of this name in it was an earlier instance."""
    joined = snapshot[own].create_revision
    earlier = snapshot.under(keys.generations_prefix).items()
    return max((int(number) for number, entry in earlier if entry.create_revision < joined), default=0)


def _log_folder(settings: JobSettings) -> Path | None:
    """The folder for the logs of this node's workers, or None where torchrun would write none."""
    root = settings.launch_config.logs_specs.root_log_dir
    return None if root == os.devnull else Path(root) / settings.run_id


def _log_to_stderr() -> None:
    """Log etc-run's own lines to standard error; torch's loggers keep their configuration."""
    logging.getLogger("etc_agent.rendezvous").setLevel(logging.WARNING)
    elastic = "torch.distributed.elastic.multiprocessing"
    for name in (f"{elastic}.api", f"{elastic}.errors", "torch.numa.binding"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # etc-run logs the same failure once
    root = logging.getLogger("etc_agent")
    if not root.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("etc-run: %(message)s"))
        root.addHandler(handler)
        root.setLevel(os.environ.get("ETC_LOG_LEVEL", "INFO").upper())
        root.propagate = False
