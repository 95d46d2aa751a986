"""Who may enter a run that is there already."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest

from etc_agent.agent.admission import admit, job_rules
from etc_agent.agent.safety import testimony
from etc_agent.agent.settings import JobSettings, ModelFacts, Spares, Timeouts
from etc_agent.errors import EtcError
from etc_agent.parallel.config import ParallelConfig
from etc_agent.parallel.generation import Generation
from etc_agent.parallel.topology import Slot
from etc_agent.reconfig.known.records import Ack, Current, Outcome
from etc_agent.rendezvous.etcd.client import EtcdClient
from etc_agent.rendezvous.keys import JobKeys

LEASE_S = 1.0
LONG_S = 60.0
"""A lease that no test waits for."""


def settings(keys: JobKeys, **changes: Any) -> JobSettings:
    usual: dict[str, Any] = {
        "entrypoint": "/usr/bin/python3", "args": ("-u", "train.py"), "launch_config": None, "run_id": keys.run_id,
        "min_nodes": 1, "max_nodes": 2, "num_slots": 1, "timeouts": Timeouts(lease_s=LONG_S),
    }
    return JobSettings(**{**usual, **changes})


def work() -> None:
    """A function that is run on every worker."""


def test_a_run_whose_leases_have_all_lapsed_for_a_moment_is_joined_not_replaced(
    client: EtcdClient, keys: JobKeys
) -> None:
    job = settings(keys)
    incarnation = admit(job, client, keys)
    client.put(keys.current, json.dumps(Current(committed=3).to_json()))
    back = threading.Timer(0.3, client.put, [keys.node("a"), "{}"])
    back.start()
    assert admit(job, client, keys) == incarnation
    assert client.get(keys.current) is not None
    back.join()


def test_a_run_that_nobody_is_left_of_is_replaced_after_one_lease_time(client: EtcdClient, keys: JobKeys) -> None:
    incarnation = admit(settings(keys), client, keys)
    client.put(keys.current, json.dumps(Current(committed=3).to_json()))
    begin = time.monotonic()
    assert admit(settings(keys, timeouts=Timeouts(lease_s=LEASE_S)), client, keys) != incarnation
    assert time.monotonic() - begin >= LEASE_S
    assert client.get(keys.current) is None


def killed_run(client: EtcdClient, keys: JobKeys, *testifying: str) -> str:
    """A run of nodes a and b, all of whose agents were killed, of which `testifying` have testified."""
    incarnation = admit(settings(keys), client, keys)
    generation = Generation(3, ParallelConfig(dp=2), (Slot("a", 0), Slot("b", 0)), "a:1", previous=0)
    client.put(keys.generation(3), json.dumps(generation.to_json()))
    client.put(keys.current, json.dumps(Current(committed=3).to_json()))
    client.put(keys.ack(3, "a"), json.dumps(Ack(3, "a").to_json()))
    for node in testifying:
        testimony.testify(client, keys, node, f"life of {node}", time.monotonic())
    return incarnation


def test_a_run_all_of_whose_nodes_have_testified_is_replaced_at_once(client: EtcdClient, keys: JobKeys) -> None:
    incarnation = killed_run(client, keys, "a", "b")
    begin = time.monotonic()
    assert admit(settings(keys), client, keys) != incarnation
    assert time.monotonic() - begin < LONG_S
    assert client.get(keys.gone("a")) is None


@pytest.mark.parametrize("is_said_too_early", [False, True], ids=["one has not", "one has had workers since"])
def test_a_run_one_of_whose_nodes_may_have_workers_is_not(
    client: EtcdClient, keys: JobKeys, *, is_said_too_early: bool
) -> None:
    incarnation = killed_run(client, keys, *("ab" if is_said_too_early else "a"))
    if is_said_too_early:
        client.put(keys.ack(3, "a"), json.dumps(Ack(3, "a", in_session=True).to_json()))
    begin = time.monotonic()
    assert admit(settings(keys, timeouts=Timeouts(lease_s=LEASE_S)), client, keys) != incarnation
    assert time.monotonic() - begin >= LEASE_S


def test_a_run_that_has_ended_is_replaced_at_once(client: EtcdClient, keys: JobKeys) -> None:
    admit(settings(keys), client, keys)
    client.put(keys.current, json.dumps(Current(outcome=Outcome.STOPPED).to_json()))
    client.put(keys.node("a"), "{}")  # it has yet to notice
    begin = time.monotonic()
    admit(settings(keys, max_nodes=9), client, keys)
    assert time.monotonic() - begin < LONG_S


def test_of_many_that_start_at_once_one_begins_and_the_others_join(client: EtcdClient, keys: JobKeys) -> None:
    job, found = settings(keys), []

    def enter(name: str) -> None:
        found.append(admit(job, client, keys))
        time.sleep(0.1)  # the way from here to its registration
        client.put(keys.node(name), "{}")

    agents = [threading.Thread(target=enter, args=(f"n{number}",)) for number in range(5)]
    for agent in agents:
        agent.start()
    for agent in agents:
        agent.join()
    assert len(set(found)) == 1
    assert job_rules(job).items() <= json.loads(client.get(keys.job).text).items()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "changes",
    [
        {"args": ("-u", "train.py", "--idx", "2")},
        {"args": ("-u", "serve.py")},
        {"entrypoint": "/opt/other/bin/python"},
        {"entrypoint": work, "args": ()},
        {"num_slots": 8},
        {"node_rank": 1},
        {"local_addr": "127.0.0.2"},
        {"spares": Spares.COLD},
        {"timeouts": Timeouts(lease_s=LONG_S, drain_s=1.0)},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_node_may_differ_in_what_is_its_own(client: EtcdClient, keys: JobKeys, changes: dict[str, Any]) -> None:
    incarnation = admit(settings(keys), client, keys)
    client.put(keys.node("a"), "{}")
    assert admit(settings(keys, **changes), client, keys) == incarnation


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"max_nodes": 4}, "whose nnodes is 1:2, and this node was given 1:4"),
        ({"global_batch": 32}, "whose global_batch is nothing, and this node was given 32"),
        ({"parallel": ParallelConfig(dp=2)}, "whose parallel is nothing, and this node was given PP1TP1DP2"),
        ({"allowed": (ParallelConfig(tp=2),)}, "whose allowed is nothing"),
        ({"model": ModelFacts(layers=4)}, "whose model is "),
        ({"max_restarts": 3}, "whose max_restarts is 0, and this node was given 3"),
        ({"timeouts": Timeouts(lease_s=2.0)}, "whose lease_s is 60.0, and this node was given 2.0"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_node_whose_rules_would_break_the_job_is_told_which_and_what_to_do(
    client: EtcdClient, keys: JobKeys, changes: dict[str, Any], told: str
) -> None:
    admit(settings(keys), client, keys)
    client.put(keys.node("a"), "{}")
    with pytest.raises(EtcError, match="give the same on every node, or another --rdzv-id") as raised:
        admit(settings(keys, **changes), client, keys)
    assert told in str(raised.value)
    assert "\n" not in str(raised.value)


def test_nothing_of_a_command_line_s_arguments_is_kept_in_etcd(client: EtcdClient, keys: JobKeys) -> None:
    admit(settings(keys, args=("-u", "train.py", "--token", "s3cret")), client, keys)
    entries, _ = client.get_prefix(keys.root)
    assert entries
    assert not [entry.key for entry in entries if b"s3cret" in entry.value]
