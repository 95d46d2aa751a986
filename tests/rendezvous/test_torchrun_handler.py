"""The etcd-v3 rendezvous handler: several nodes of one run in one process, over a real etcd and real stores."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from etcd_helpers import Wire, wait_until
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.registry import _register_out_of_tree_handlers, get_rendezvous_handler

from etc_agent.rendezvous.etcd.client import EtcdClient
from etc_agent.rendezvous.etcd.errors import EtcdError
from etc_agent.rendezvous.keys import JobKeys
from etc_agent.rendezvous.private.server import EtcdServer
from etc_agent.rendezvous.torchrun.handler import EtcdV3RendezvousHandler, create_handler

MakeNode = Callable[..., EtcdV3RendezvousHandler]


@pytest.fixture
def make_node(shared_etcd: EtcdServer, keys: JobKeys) -> Iterator[MakeNode]:
    made: list[EtcdV3RendezvousHandler] = []

    def make(
        min_nodes: int = 1, max_nodes: int = 4, endpoint: str = shared_etcd.endpoint, **config: object
    ) -> EtcdV3RendezvousHandler:
        config = {"last_call_timeout": 1, "lease_ttl": 2, "join_timeout": 30, **config}
        handler = create_handler(
            RendezvousParameters("etcd-v3", endpoint, keys.run_id, min_nodes, max_nodes, "127.0.0.1", **config)
        )
        made.append(handler)
        return handler

    yield make
    for handler in made:
        leave(handler)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def leave(handler: EtcdV3RendezvousHandler) -> None:
    """As when its process ends by a signal: gone, but the run goes on."""
    handler._leave()


def meet(pool: ThreadPoolExecutor, *nodes: EtcdV3RendezvousHandler) -> list[RendezvousInfo]:
    waits: list[Future[RendezvousInfo]] = []
    for node in nodes:
        waits.append(pool.submit(node.next_rendezvous))
        wait_until(lambda node=node, wait=waits[-1]: node._name in node._view().nodes or wait.done())
    return [wait.result(40) for wait in waits]


def ranks(infos: list[RendezvousInfo]) -> list[tuple[int, int]]:
    return [(info.rank, info.world_size) for info in infos]


def test_torchrun_finds_it_by_name(shared_etcd: EtcdServer, keys: JobKeys) -> None:
    _register_out_of_tree_handlers()
    handler = get_rendezvous_handler(RendezvousParameters("etcd-v3", shared_etcd.endpoint, keys.run_id, 1, 1))
    assert isinstance(handler, EtcdV3RendezvousHandler)
    assert (handler.get_backend(), handler.get_run_id()) == ("etcd-v3", keys.run_id)
    assert handler.shutdown()


def test_nodes_meet_and_share_a_store_that_the_first_one_hosts(make_node: MakeNode, pool: ThreadPoolExecutor) -> None:
    nodes = [make_node(min_nodes=3, max_nodes=3) for _ in range(3)]
    infos = meet(pool, *nodes)
    assert ranks(infos) == [(0, 3), (1, 3), (2, 3)]
    infos[2].store.set("key", "value")
    assert infos[0].store.get("key") == b"value"
    assert len({info.bootstrap_store_info.master_port for info in infos}) == 1
    assert [node.num_nodes_waiting() for node in nodes] == [0, 0, 0]


def test_every_generation_has_a_fresh_store(make_node: MakeNode, pool: ThreadPoolExecutor) -> None:
    nodes = [make_node(min_nodes=2, max_nodes=2) for _ in range(2)]
    (before, _) = meet(pool, *nodes)
    before.store.set("key", "stale")
    (after, other) = meet(pool, *nodes)
    assert not other.store.check(["key"])
    assert after.bootstrap_store_info.master_port != before.bootstrap_store_info.master_port


def test_two_joiners_within_the_settle_window_make_one_generation(
    make_node: MakeNode, pool: ThreadPoolExecutor
) -> None:
    first = make_node(last_call_timeout=2)
    meet(pool, first)
    joiners = [make_node(last_call_timeout=2) for _ in range(2)]
    waits = [pool.submit(joiners[0].next_rendezvous)]
    begin = time.monotonic()
    wait_until(lambda: len(first._view().nodes) == 2)
    assert first.num_nodes_waiting() == 0  # training goes on meanwhile
    waits.append(pool.submit(joiners[1].next_rendezvous))
    wait_until(lambda: first.num_nodes_waiting())
    assert first.num_nodes_waiting() == 2
    assert time.monotonic() - begin >= 2
    assert ranks([first.next_rendezvous(), *(wait.result(40) for wait in waits)])[0] == (0, 3)
    assert first._generation == 2


def test_a_departed_node_is_noticed_and_the_survivors_keep_their_order(
    make_node: MakeNode, pool: ThreadPoolExecutor
) -> None:
    settle_s = 20
    nodes = [make_node(max_nodes=3, last_call_timeout=settle_s) for _ in range(3)]
    meet(pool, *nodes)
    leave(nodes[0])  # the host of the store
    wait_until(lambda: nodes[1].num_nodes_waiting() == 1 and nodes[2].num_nodes_waiting() == 1)
    begin = time.monotonic()
    infos = meet(pool, nodes[2], nodes[1])
    assert time.monotonic() - begin < settle_s / 2  # scaling below the maximum waits for nobody
    assert ranks(infos) == [(1, 2), (0, 2)]
    infos[0].store.set("key", "value")
    assert infos[1].store.get("key") == b"value"


def test_a_member_that_meets_again_brings_the_others(make_node: MakeNode, pool: ThreadPoolExecutor) -> None:
    nodes = [make_node(max_nodes=2) for _ in range(2)]
    meet(pool, *nodes)
    wait = pool.submit(nodes[1].next_rendezvous)
    wait_until(lambda: nodes[0].num_nodes_waiting() == 1)
    assert not wait.done()
    assert ranks([nodes[0].next_rendezvous(), wait.result(40)]) == [(0, 2), (1, 2)]


def test_a_joiner_that_asks_for_rank_0_gets_it_and_nobody_keeps_a_stale_address(
    make_node: MakeNode, pool: ThreadPoolExecutor
) -> None:
    old = make_node(max_nodes=2)
    (before,) = meet(pool, old)
    joiner = make_node(max_nodes=2, node_rank=0)
    wait = pool.submit(joiner.next_rendezvous)
    wait_until(lambda: old.num_nodes_waiting() == 1)
    infos = [old.next_rendezvous(), wait.result(40)]
    assert ranks(infos) == [(1, 2), (0, 2)]
    ports = {info.bootstrap_store_info.master_port for info in infos}
    assert len(ports) == 1
    assert before.bootstrap_store_info.master_port not in ports


def test_asked_for_ranks_hold_from_the_start(make_node: MakeNode, pool: ThreadPoolExecutor) -> None:
    nodes = [make_node(min_nodes=3, max_nodes=3, node_rank=rank) for rank in (2, 0, 1)]
    assert ranks(meet(pool, *nodes)) == [(2, 3), (0, 3), (1, 3)]


def test_a_waiting_node_replaces_a_lost_one_at_once(make_node: MakeNode, pool: ThreadPoolExecutor) -> None:
    nodes = [make_node(min_nodes=2, max_nodes=2) for _ in range(2)]
    meet(pool, *nodes)
    waiting = make_node(min_nodes=2, max_nodes=2)
    wait = pool.submit(waiting.next_rendezvous)
    wait_until(lambda: len(nodes[0]._view().nodes) == 3)
    assert nodes[0].num_nodes_waiting() == 0
    leave(nodes[1])
    wait_until(lambda: nodes[0].num_nodes_waiting())
    assert ranks([nodes[0].next_rendezvous(), wait.result(40)]) == [(0, 2), (1, 2)]


def test_a_waiting_node_ends_without_error_when_the_run_succeeds(make_node: MakeNode, pool: ThreadPoolExecutor) -> None:
    member = make_node(max_nodes=1)
    meet(pool, member)
    waiting = make_node(max_nodes=1)
    wait = pool.submit(waiting.next_rendezvous)
    wait_until(lambda: len(member._view().nodes) == 2)
    assert member.shutdown()
    with pytest.raises(SystemExit) as caught:
        wait.result(40)
    assert caught.value.code == 0
    assert waiting.is_closed()


def test_a_failed_run_ends_for_everybody(make_node: MakeNode, pool: ThreadPoolExecutor) -> None:
    failing, other = make_node(max_nodes=2), make_node(max_nodes=2)
    meet(pool, failing, other)
    try:
        raise ValueError("its workers have failed")
    except ValueError:
        assert failing.shutdown()
    wait_until(lambda: other.num_nodes_waiting())
    with pytest.raises(RendezvousClosedError):
        other.next_rendezvous()


def test_a_finished_member_does_not_disturb_the_others(make_node: MakeNode, pool: ThreadPoolExecutor) -> None:
    done, other = make_node(max_nodes=2), make_node(max_nodes=2)
    meet(pool, done, other)
    assert done.shutdown()
    wait_until(other.is_closed)
    assert other.num_nodes_waiting() == 0


def test_a_closed_run_is_closed_to_latecomers_until_its_last_node_has_gone(
    make_node: MakeNode, pool: ThreadPoolExecutor
) -> None:
    old = make_node(max_nodes=2)
    meet(pool, old)
    old.set_closed()
    late = make_node(max_nodes=2)
    with pytest.raises(RendezvousClosedError, match="has ended"):
        late.next_rendezvous()
    leave(old)
    leave(late)
    again = make_node(max_nodes=1)
    assert not again.is_closed()
    assert ranks(meet(pool, again)) == [(0, 1)]
    assert not again.is_closed()
    again.set_closed()
    wait_until(again.is_closed)


def test_a_process_that_ends_without_shutdown_leaves_at_once(
    make_node: MakeNode, shared_etcd: EtcdServer, keys: JobKeys
) -> None:
    """As torchrun does at SIGTERM: it ends by an exception, and leaves the run open for the others."""
    watcher = make_node(min_nodes=1)
    script = (
        "from torch.distributed.elastic.rendezvous import RendezvousParameters as P\n"
        "from etc_agent.rendezvous.torchrun.handler import create_handler\n"
        f"p = P('etcd-v3', '{shared_etcd.endpoint}', '{keys.run_id}', 1, 1, '127.0.0.1', lease_ttl=600)\n"
        "create_handler(p).next_rendezvous()\n"
        "raise SystemExit(3)\n"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=60, check=False).returncode == 3
    wait_until(lambda: watcher._view().roster.generation == 1 and not watcher._view().nodes)
    assert not watcher.is_closed()


def test_too_few_nodes_is_a_timeout_that_says_how_many_came(make_node: MakeNode) -> None:
    with pytest.raises(RendezvousTimeoutError, match=r"within 1 s \(1 nodes came, at least 2 are needed\)"):
        make_node(min_nodes=2, join_timeout=1).next_rendezvous()


def test_a_node_cut_off_from_etcd_comes_back_into_the_next_generation(
    make_node: MakeNode, pool: ThreadPoolExecutor, shared_etcd: EtcdServer
) -> None:
    with Wire(shared_etcd.endpoint) as wire:
        near = make_node(max_nodes=2)
        far = make_node(max_nodes=2, endpoint=wire.endpoint, read_timeout=1)
        meet(pool, near, far)
        wire.cut()
        wait_until(lambda: near.num_nodes_waiting() == 1)
        assert far.num_nodes_waiting() == 0  # it knows nothing, so it decides nothing
        assert ranks(meet(pool, near)) == [(0, 1)]
        wire.mend()
        wait_until(lambda: far.num_nodes_waiting() == 1)
        assert near.num_nodes_waiting() == 0  # it is back, but busy still
        wait = pool.submit(far.next_rendezvous)
        wait_until(lambda: near.num_nodes_waiting() == 1)
        assert ranks([near.next_rendezvous(), wait.result(40)]) == [(0, 2), (1, 2)]


def test_nobody_at_the_endpoint_and_bad_settings_are_one_clear_line(make_node: MakeNode) -> None:
    with pytest.raises(RendezvousConnectionError, match=r"etcd does not answer at 127\.0\.0\.1:1"):
        make_node(endpoint="127.0.0.1:1", read_timeout=1)
    with pytest.raises(EtcdError, match=r"lease_ttl=soon was given in --rdzv-conf; it must be a whole number"):
        make_node(lease_ttl="soon")
    with pytest.raises(EtcdError, match="must be http or https"):
        make_node(protocol="gopher")
    with pytest.raises(EtcdError, match="ETC_PASSWORD"):
        make_node(user="bob")


def test_what_a_run_leaves_in_etcd_is_its_roster(
    make_node: MakeNode, pool: ThreadPoolExecutor, client: EtcdClient, keys: JobKeys
) -> None:
    nodes = [make_node(max_nodes=2) for _ in range(2)]
    meet(pool, *nodes)
    for node in nodes:
        node.shutdown()
    assert [kv.key for kv in client.get_prefix(keys.root)[0]] == [keys.torchrun_roster]
