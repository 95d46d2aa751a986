"""A change that is given up while it is prepared is freed at once, whatever it waits for; the next one goes well."""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mini_agent import NODE, MiniAgent

from etc_agent.control.messages import Prepare, Prepared
from etc_agent.errors import EtcError, PeerLostError
from etc_agent.parallel.config import ParallelConfig
from etc_agent.parallel.generation import Generation
from etc_agent.parallel.topology import Slot
from etc_agent.worker.world.connections import Connections, StoreConnection
from etc_agent.worker.world.stores import meet, raw_group


def slot(index: int) -> Slot:
    return Slot(NODE, index)


def held(line: dict[str, Any]) -> tuple[int, ...]:
    return tuple(line[key] for key in ("fds", "threads", "shared"))


def latest(agent: MiniAgent, rank: int) -> dict[str, Any]:
    return [line for line in agent.steps() if line["rank"] == rank][-1]


def see_it_freed(agent: MiniAgent, before: dict[int, dict[str, Any]]) -> None:
    """Wait until no rank has more than it had `before`; far shorter than any wait for peers takes."""
    for rank, line in before.items():
        agent.wait_for(lambda rank=rank, line=line: held(latest(agent, rank)) <= held(line), f"rank {rank} to be free")
        assert not any(name.startswith("etc-change") for name in latest(agent, rank)["python_threads"])


def assert_the_next_change_keeps(agent: MiniAgent, number: int) -> None:
    agent.change("DP2")
    agent.first_steps()
    assert f"generation {number} was migrated to in keep mode, since old and new state fit together" in agent.logs()


def test_a_change_whose_peer_never_comes_is_freed_as_soon_as_it_is_withdrawn(tmp_path: Path) -> None:
    fault = {"switch_timeout_s": 600.0, "timeout_s": 600.0}
    with MiniAgent(tmp_path, pause_s=0.02, verify=False, timeout_s=20.0, fault=fault) as agent:
        agent.start("PP2")
        agent.wait_for(lambda: bool(agent.steps()) and agent.steps()[-1]["step"] > 3, "the first steps")
        before = {rank: latest(agent, rank) for rank in (0, 1)}
        previous = agent.generation
        assert previous is not None
        placement = (slot(0), slot(1), slot(9))
        generation = Generation(2, ParallelConfig.parse("PP3"), placement, previous.store, 1)
        agent.next_id = 3
        for each in (slot(0), slot(1)):
            agent.send(each, Prepare(NODE, generation.to_json(), previous.to_json()))
        agent.wait_for(lambda: "etc-change-2" in latest(agent, 0)["python_threads"], "the preparation to begin")
        agent.withdraw(generation, [slot(0), slot(1)])
        see_it_freed(agent, before)
        assert_the_next_change_keeps(agent, 3)
        assert "Traceback" not in agent.logs()


def test_a_change_whose_peer_hangs_when_memory_is_allocated_is_freed_as_soon_as_it_is_withdrawn(tmp_path: Path) -> None:
    fault = {"switch_timeout_s": 600.0, "timeout_s": 600.0, "hang_in_connecting": 2}
    with MiniAgent(tmp_path, pause_s=0.02, verify=False, timeout_s=20.0, fault=fault) as agent:
        agent.start("PP2")
        agent.wait_for(lambda: bool(agent.steps()) and agent.steps()[-1]["step"] > 3, "the first steps")
        before = {rank: latest(agent, rank) for rank in (0, 1)}
        generation, everyone = agent.prepare("TP3")
        agent.wait_for(lambda: latest(agent, 0)["shared"] > before[0]["shared"], "shared memory of the next generation")
        for each in everyone:
            assert not any(isinstance(message, Prepared) for message in agent.workers[each].heard)
        agent.withdraw(generation, everyone)
        see_it_freed(agent, before)
        assert_the_next_change_keeps(agent, 3)


def test_a_change_begins_when_the_build_of_the_one_that_was_given_up_has_ended(tmp_path: Path) -> None:
    with MiniAgent(tmp_path, pause_s=0.02, verify=False, timeout_s=30.0, fault={"slow_build": 2}) as agent:
        agent.start("PP2")
        agent.wait_for(lambda: {line["rank"] for line in agent.steps()} == {0, 1}, "the first steps")
        generation, everyone = agent.prepare("TP2")
        for rank in (0, 1):
            agent.wait_for(lambda rank=rank: "begun 2" in latest(agent, rank)["builds"], "the build to begin")
        agent.withdraw(generation, everyone)
        agent.change("DP2")
        agent.first_steps()
        agent.wait_for(lambda: {line["rank"] for line in agent.steps() if line["generation"] == 3} == {0, 1}, "steps")
        for rank in (0, 1):
            assert latest(agent, rank)["builds"] == ["built 1", "begun 2", "built 2", "built 3"]


def test_cutting_a_change_leaves_the_sockets_of_others_alone() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(listener.getsockname())
    server, _ = listener.accept()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port
    ours, theirs = Connections(), Connections()
    own_client = StoreConnection()
    change_store = own_client.record(lambda: dist.TCPStore("127.0.0.1", port, is_master=False), port)
    doomed = pair(dist.HashStore(), ours)
    other = pair(dist.HashStore(), theirs)
    failures: list[str] = []

    def wait_in_vain() -> None:
        try:
            doomed[0].allreduce([torch.ones(1)]).wait()
        except RuntimeError as error:
            failures.append(str(error))

    waiting = threading.Thread(target=wait_in_vain)
    waiting.start()
    assert ours.cut() >= 1, "gloo closes the other end when it sees the first one cut"
    waiting.join(10)
    assert not waiting.is_alive()
    assert failures

    sums = [torch.ones(1), torch.ones(1)]
    works = [group.allreduce([sums[rank]]) for rank, group in enumerate(other)]
    for work in works:
        work.wait()
    assert sums == [torch.tensor([2.0])] * 2
    client.sendall(b"x")
    assert server.recv(1) == b"x"
    own_client.cut()
    with pytest.raises(dist.DistError):
        change_store.get("anything")
    store.set("still", "there")
    assert dist.TCPStore("127.0.0.1", port, is_master=False).get("still") == b"there"
    for each in (client, server, listener):
        each.close()


def pair(store: dist.Store, connections: Connections) -> list[dist.ProcessGroup]:
    """Two ranks of one group, both in this process."""
    made: dict[int, dist.ProcessGroup] = {}

    def make(rank: int) -> None:
        made[rank] = raw_group(store, rank, 2, 30, connections)

    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [made[0], made[1]]


def test_a_port_that_the_script_opens_meanwhile_makes_nothing_cut() -> None:
    connections = Connections()
    opened: list[socket.socket] = []

    def make_devices() -> list[str]:
        opened.extend(socket.create_server(("127.0.0.1", 0)) for _ in range(2))
        return ["device"]

    assert connections.listen(make_devices) == ([], ["device"])
    assert connections.cut() == 0
    for each in opened:
        each.close()


def test_a_meeting_names_those_that_did_not_come_and_can_be_left() -> None:
    with pytest.raises(PeerLostError, match=r"worker 1, 2 of the change did not come within 0\.05 s"):
        meet(dist.HashStore(), 0, 3, 0.05, lambda: None)

    def withdrawn() -> None:
        raise EtcError("withdrawn")

    with pytest.raises(EtcError, match="withdrawn"):
        meet(dist.HashStore(), 0, 2, 60.0, withdrawn)
