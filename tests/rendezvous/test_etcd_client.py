from __future__ import annotations

import threading
import time

import pytest
from etcd_helpers import wait_until

from etc_agent.rendezvous.etcd.client import EtcdClient
from etc_agent.rendezvous.etcd.errors import EtcdError, EtcdUnavailable, LeaseLostError
from etc_agent.rendezvous.etcd.transport import parse_endpoint
from etc_agent.rendezvous.etcd.values import Compare, Delete, DeletePrefix, Event, Get, GetPrefix, Put
from etc_agent.rendezvous.etcd.wire import range_end
from etc_agent.rendezvous.keys import JobKeys
from etc_agent.rendezvous.private.server import EtcdServer


def test_what_is_put_is_read_back_with_its_revisions(client: EtcdClient, keys: JobKeys) -> None:
    first = client.put(keys.scale, "8")
    second = client.put(keys.scale, b"\x00\xff")
    found = client.get(keys.scale)
    assert found is not None
    assert (found.value, found.create_revision, found.mod_revision, found.version) == (b"\x00\xff", first, second, 2)
    client.delete(keys.scale)
    assert client.get(keys.scale) is None


def test_a_prefix_holds_its_own_keys_only_in_order(client: EtcdClient) -> None:
    mine, other = JobKeys("run"), JobKeys("run-2")
    for keys in (mine, other):
        client.put(keys.node("b"), "")
        client.put(keys.node("a"), "")
    found, revision = client.get_prefix(mine.root)
    assert [kv.key for kv in found] == [mine.node("a"), mine.node("b")]
    assert revision >= max(kv.mod_revision for kv in found)
    client.delete_prefix(mine.root)
    assert client.get_prefix(mine.root)[0] == []
    assert len(client.get_prefix(other.root)[0]) == 2


def test_range_end_is_the_successor_of_the_prefix() -> None:
    assert range_end(b"a/") == b"a0"
    assert range_end(b"a\xff\xff") == b"b"
    assert range_end(b"\xff") == b"\0"


def test_a_transaction_applies_one_branch_whole(client: EtcdClient, keys: JobKeys) -> None:
    put = client.transact([Compare.absent(keys.current)], [Put(keys.current, "1"), Put(keys.job, "j"), Get(keys.job)])
    assert put.succeeded
    assert put.reads[2][0].value == b"j"
    assert put.reads[2][0].mod_revision == put.revision
    refused = client.transact(
        [Compare.mod_revision(keys.current, put.revision), Compare.value(keys.current, "other")],
        [DeletePrefix(keys.root)],
        [GetPrefix(keys.root)],
    )
    assert not refused.succeeded
    assert {kv.key for kv in refused.reads[0]} == {keys.current, keys.job}
    conditions = [
        Compare.present(keys.current),
        Compare.create_revision(keys.current, put.revision),
        Compare.version(keys.current, 1),
    ]
    assert client.transact(conditions, [Delete(keys.current)]).succeeded
    assert client.get(keys.current) is None


def test_keys_live_and_die_with_their_lease(client: EtcdClient, keys: JobKeys) -> None:
    lease = client.grant_lease(30)
    client.put(keys.node("a"), "", lease)
    assert client.keep_lease_alive(lease) == 30
    assert client.lease_time_to_live(lease) in range(28, 31)
    client.revoke_lease(lease)
    client.revoke_lease(lease)
    assert client.get(keys.node("a")) is None
    assert client.lease_time_to_live(lease) is None
    with pytest.raises(LeaseLostError):
        client.keep_lease_alive(lease)
    with pytest.raises(LeaseLostError):
        client.put(keys.node("a"), "", lease)
    with pytest.raises(LeaseLostError):
        client.transact([], [Put(keys.node("a"), "", lease)])


def test_a_watch_tells_everything_once_in_order_and_a_revision_in_one_piece(client: EtcdClient, keys: JobKeys) -> None:
    begin = client.put(keys.scale, "before")
    batches: list[tuple[Event, ...]] = []
    watch = client.watch_prefix(keys.root, begin, lambda events, _: batches.append(tuple(events)), lambda: 0)
    client.transact([], [Put(keys.generation(g), "x") for g in range(100)])
    client.delete(keys.scale)
    wait_until(lambda: sum(map(len, batches)) == 102)
    watch.cancel()
    events = [event for batch in batches for event in batch]
    assert [event.is_put for event in events] == [True] * 101 + [False]
    assert events[0].kv.value == b"before"
    assert any(len({event.kv.mod_revision for event in batch}) == 1 and len(batch) >= 100 for batch in batches) or any(
        len(batch) > 100 for batch in batches
    )


def test_a_large_revision_comes_whole_though_etcd_sends_it_in_fragments(client: EtcdClient, keys: JobKeys) -> None:
    begin = client.put(keys.scale, "")
    for key in ("a", "b", "c"):
        client.put(keys.node(key), b"x" * 900_000)
    sizes: list[int] = []
    client.transact([], [DeletePrefix(keys.nodes_prefix)])
    watch = client.watch_prefix(keys.root, begin, lambda events, _: sizes.extend(len(e.kv.value) for e in events), int)
    wait_until(lambda: len(sizes) == 7)
    watch.cancel()
    assert sorted(sizes) == [0, 0, 0, 0, 900_000, 900_000, 900_000]


def test_a_callback_that_raises_does_not_end_the_watch(client: EtcdClient, keys: JobKeys) -> None:
    seen: list[bytes] = []

    def explode(events: object, _: int) -> None:
        seen.extend(event.kv.value for event in events)  # type: ignore[attr-defined]
        raise ZeroDivisionError

    watch = client.watch_prefix(keys.root, client.put(keys.scale, "1") + 1, explode, lambda: 0)
    client.put(keys.scale, "2")
    client.put(keys.scale, "3")
    wait_until(lambda: seen == [b"2", b"3"])
    watch.cancel()


def test_a_cancelled_watch_is_silent_and_leaves_no_thread(client: EtcdClient, keys: JobKeys) -> None:
    seen: list[object] = []
    watch = client.watch_prefix(keys.root, 0, lambda events, _: seen.append(events), lambda: 0)
    wait_until(lambda: watch.is_connected)
    watch.cancel()
    watch.cancel()
    client.put(keys.scale, "1")
    assert not watch.is_connected
    assert seen == []
    assert not any(thread.name == "etcd-watch" for thread in threading.enumerate())


def test_nobody_at_the_address_is_one_clear_line_within_the_time() -> None:
    with EtcdClient(["127.0.0.1:1", "127.0.0.1:2"], timeout_s=0.5) as client:
        begin = time.monotonic()
        with pytest.raises(EtcdUnavailable, match=r"^etcd does not answer at 127\.0\.0\.1:1, 127\.0\.0\.1:2 \(tried"):
            client.get("/x")
        assert time.monotonic() - begin < 4


def test_a_dead_endpoint_among_live_ones_does_not_matter(shared_etcd: EtcdServer, keys: JobKeys) -> None:
    for _ in range(4):  # the first endpoint is drawn by lot
        with EtcdClient(["127.0.0.1:1", shared_etcd.endpoint]) as client:
            assert client.transact([], [Put(keys.scale, "1")]).succeeded
            assert client.put(keys.scale, "1")


def test_a_closed_client_says_so(shared_etcd: EtcdServer) -> None:
    client = EtcdClient([shared_etcd.endpoint])
    client.get("/x")
    client.close()
    client.close()
    with pytest.raises(EtcdError, match="closed"):
        client.get("/x")


@pytest.mark.parametrize(
    ("text", "address", "is_https"),
    [
        ("127.0.0.1:2379", "127.0.0.1:2379", False),
        ("http://host:1", "host:1", False),
        ("https://host.example:2379/", "host.example:2379", True),
        ("[::1]:2379", "[::1]:2379", False),
    ],
)
def test_endpoints_are_taken_with_and_without_scheme(text: str, address: str, is_https: bool) -> None:
    assert parse_endpoint(text) == (address, is_https)


@pytest.mark.parametrize("text", ["", "host", "host:", ":2379", "host:99999", "host:x", "http://", "host:1/path"])
def test_a_malformed_endpoint_is_named(text: str) -> None:
    with pytest.raises(EtcdError, match=r"is not host:port"):
        EtcdClient([text])


def test_no_endpoint_and_half_a_login_are_refused() -> None:
    with pytest.raises(EtcdError, match="no etcd endpoint"):
        EtcdClient([])
    with pytest.raises(EtcdError, match="without a password"):
        EtcdClient(["h:1"], user="root")


@pytest.mark.parametrize("run_id", ["", "a/b", "../x", "-a", "a b", "x" * 200, "run\n"])
def test_a_run_id_that_cannot_be_a_key_is_refused(run_id: str) -> None:
    with pytest.raises(EtcdError, match="run id"):
        JobKeys(run_id)
