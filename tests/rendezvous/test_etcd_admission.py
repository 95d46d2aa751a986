"""Who may enter a run that is there already."""

from __future__ import annotations

import json
import threading
import time

import pytest

from etc_agent.agent.admission import admit, job_spec
from etc_agent.agent.settings import JobSettings, Timeouts
from etc_agent.errors import EtcError
from etc_agent.reconfig.records import Current, Outcome
from etc_agent.rendezvous.client import EtcdClient
from etc_agent.rendezvous.keys import JobKeys

LEASE_S = 1.0
LONG_S = 60.0
"""A lease that no test waits for."""


def settings(keys: JobKeys, *args: str, lease_s: float = LONG_S) -> JobSettings:
    return JobSettings(
        "train.py", args, launch_config=None, run_id=keys.run_id, min_nodes=1, max_nodes=2, num_slots=1,
        timeouts=Timeouts(lease_s=lease_s),
    )


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
    assert admit(settings(keys, "other", lease_s=LEASE_S), client, keys) != incarnation
    assert time.monotonic() - begin >= LEASE_S
    assert client.get(keys.current) is None


def test_a_run_that_has_ended_is_replaced_at_once(client: EtcdClient, keys: JobKeys) -> None:
    admit(settings(keys), client, keys)
    client.put(keys.current, json.dumps(Current(outcome=Outcome.STOPPED).to_json()))
    client.put(keys.node("a"), "{}")  # it has yet to notice
    begin = time.monotonic()
    admit(settings(keys, "other"), client, keys)
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
    assert job_spec(job).items() <= json.loads(client.get(keys.job).text).items()  # type: ignore[union-attr]


def test_another_job_is_told_what_differs(client: EtcdClient, keys: JobKeys) -> None:
    admit(settings(keys), client, keys)
    client.put(keys.node("a"), "{}")
    with pytest.raises(EtcError, match="in use by another job: its args is"):
        admit(settings(keys, "other"), client, keys)
