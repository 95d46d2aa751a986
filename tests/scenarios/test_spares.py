"""Idle slots hold warm spares, which become workers at once and are no part of the job before."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import running
from running import TINY_JOB, Etcd, EtcRun, etcd_of, standalone, steps_of, wait_for_step, wait_until
from test_several_nodes import node, tiny

from etc_agent.rendezvous.private.server import EtcdServer

Cleanup = Callable[[EtcRun], EtcRun]
SPARE = "etc_agent.worker.process.spare"


@pytest.fixture(autouse=True)
def _warm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "SPARES", "warm")


def spares_of(job: EtcRun) -> list[int]:
    return [pid for pid, command in job.descendants().items() if SPARE in command]


def warm_spare_of(job: EtcRun, but: int = 0) -> int:
    def is_warm(pid: int) -> bool:
        return pid != but and b"libtorch_python" in Path(f"/proc/{pid}/maps").read_bytes()

    return wait_until(lambda: next(filter(is_warm, spares_of(job)), None), "a warm spare")


def test_a_spare_becomes_a_worker_and_its_log_is_where_the_workers_is(tmp_path: Path, cleanup: Cleanup) -> None:
    options = ("--parallel", "PP1TP1DP1", "--log-dir", tmp_path / "logs", "--tee", "3")
    job = cleanup(standalone(tmp_path, TINY_JOB, tmp_path, 100_000, 0.05, slots=2, options=options))
    etcd = etcd_of(job)
    wait_for_step(tmp_path, 3)
    first = warm_spare_of(job)
    (name,) = etcd.get("status")["nodes"]
    wait_until(lambda: etcd.get(f"nodes/{name}")["spares"] == [1], "the other nodes to know")
    os.kill(first, signal.SIGKILL)
    job.wait_for("the warm spare in slot 1 ended")
    wait_until(lambda: etcd.get(f"nodes/{name}")["spares"] == [], "the other nodes to know")
    spare = warm_spare_of(job, but=first)
    etcd.scale("2")
    etcd.reply_to("2", "done")
    wait_until(lambda: any(line["pid"] == spare for line in steps_of(tmp_path)), "steps of the spare's process")
    assert (tmp_path / "logs" / "job" / "generation_2" / etcd.get("status")["nodes"][0] / "1" / "stderr.log").exists()
    assert etcd.get("current")["restarts"] == 0
    job.send(signal.SIGINT)
    assert job.wait() == 130
    job.assert_nothing_left()


def test_the_reserve_takes_the_slot_of_a_worker_that_dies_and_another_follows_it(
    tmp_path: Path, cleanup: Cleanup
) -> None:
    options = ("--max-restarts", "1", "--tee", "3")
    prefix = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[rank ${rank} in ${local_rank}] "}
    environment = {"ETC_SPARES": "reserve", "ETC_LOG_LEVEL": "DEBUG", **prefix}
    job = cleanup(
        standalone(tmp_path, TINY_JOB, tmp_path, 100_000, 0.05, slots=2, options=options, environment=environment)
    )
    etcd = etcd_of(job)
    job.wait_for("the warm spare in slot 2 is ready")
    reserve = warm_spare_of(job)
    (name,) = etcd.get("status")["nodes"]
    assert etcd.get(f"nodes/{name}")["spares"] == [], "no slot is free"
    wait_for_step(tmp_path, 3)
    victim = next(line["pid"] for line in steps_of(tmp_path) if line["rank"] == 1)
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: any(line["pid"] == reserve for line in steps_of(tmp_path)), "steps of the reserve")
    assert {line["rank"] for line in steps_of(tmp_path) if line["pid"] == reserve} == {1}
    assert warm_spare_of(job, but=reserve) not in (victim, reserve)
    job.send(signal.SIGINT)
    assert job.wait() == 130
    job.assert_nothing_left()


@pytest.mark.parametrize("how", [("look.py",), ("-m", "look")], ids=["script", "module"])
def test_a_script_in_a_spare_finds_what_it_finds_in_python(
    tmp_path: Path, cleanup: Cleanup, how: tuple[str, ...]
) -> None:
    (tmp_path / "beside.py").write_text("HERE = True")
    script = tmp_path / "look.py"
    script.write_text(
        "import json, os, pathlib, pickle, sys, time, beside, numpy\n"
        "class Thing: pass\n"
        "def look():\n"
        "    assert isinstance(pickle.loads(pickle.dumps(Thing())), Thing)\n"
        "    main = sys.modules['__main__']\n"
        "    return {'argv': sys.argv, 'file': __file__, 'name': __name__, 'main': main.look is look,\n"
        "            'code': look.__code__.co_filename, 'builtins': str(__builtins__), 'notes': __annotations__,\n"
        "            'loader': type(__loader__).__name__, 'names': sorted(globals()),\n"
        "            'rank': os.environ['RANK'], 'path': sys.path, 'module': __spec__ and __spec__.name}\n"
        "warm = 'process.spare' in pathlib.Path('/proc/self/cmdline').read_text()\n"
        "pathlib.Path(f'seen-{\"warm\" if warm else \"cold\"}-{os.getpid()}').write_text(json.dumps(look()))\n"
        "while not (warm and os.environ['WORLD_SIZE'] == '2'): time.sleep(0.05)\n"
        "raise ValueError('in a spare')\n"
    )
    options = ("--parallel", "PP1TP1DP1", "--rdzv-conf", "start_s=1")
    environment = {"ETC_SPARES": "warm", "ETC_LOG_LEVEL": "DEBUG"}
    job = cleanup(standalone(tmp_path, *how, "an argument", slots=2, options=options, environment=environment))
    job.wait_for("the warm spare in slot 1 is ready")
    (cold,) = wait_until(lambda: list(tmp_path.glob("seen-cold-*")), "the cold worker")
    etcd_of(job).scale("2")
    (warm,) = wait_until(lambda: list(tmp_path.glob("seen-warm-*")), "the warm worker")
    assert job.wait() == 1
    seen = [json.loads(path.read_text()) for path in (cold, warm)]
    assert {key for key in seen[0] if seen[0][key] != seen[1][key]} <= {"rank"}
    at = job.output.index("ValueError: in a spare")
    traceback = job.output[job.output.rindex("Traceback", 0, at) : at]
    assert traceback.splitlines()[1].strip().startswith(f'File "{script}"')
    job.assert_nothing_left()


def test_a_spare_node_takes_over_from_one_that_leaves_and_another_exits_0_at_the_end(
    tmp_path: Path, cleanup: Cleanup, etcd_server: EtcdServer
) -> None:
    first = cleanup(node(tmp_path, etcd_server, 2, *tiny(tmp_path), nnodes="1"))
    first.wait_for("starts")
    second, third = (cleanup(node(tmp_path, etcd_server, n, *tiny(tmp_path), nnodes="1")) for n in (3, 4))
    warm = {run: warm_spare_of(run) for run in (second, third)}
    wait_for_step(tmp_path, 3)
    first.send(signal.SIGTERM)
    assert first.wait() == 0
    at = max(line["step"] for line in steps_of(tmp_path))
    wait_for_step(tmp_path, at + 5)
    (tmp_path / "last").write_text(str(at + 5))
    assert (second.wait(), third.wait()) == (0, 0)
    lines = steps_of(tmp_path)
    assert [line["step"] for line in lines] == list(range(len(lines))), "no step was lost or run twice"
    assert lines[-1]["pid"] in (warm[second], warm[third])
    for run in (first, second, third):
        run.assert_nothing_left()


def test_a_node_that_cannot_hand_over_stops_at_its_deadline(
    tmp_path: Path, cleanup: Cleanup, etcd_server: EtcdServer
) -> None:
    etcd = Etcd(etcd_server.endpoint, "job")
    first, second = (cleanup(node(tmp_path, etcd_server, n, *tiny(tmp_path), nnodes="1:2")) for n in (2, 3))
    wait_until(lambda: len((etcd.get("status") or {}).get("nodes", ())) == 2, "two nodes")
    wait_for_step(tmp_path, 3)
    etcd.put("control/pause", "true")  # so that nothing is handed over
    etcd.put("control/drain/127.0.0.3", "0.5")
    assert second.wait() == 1
    assert "the state was not handed over within 0.5 s; stopping" in second.our_lines()[-1]
    second.assert_nothing_left()
    first.wait_for(r"loss 1: node 127.0.0.3 was lost")
    first.wait_for(r"generation 2, PP1TP1DP1, trains from step \d+; 1 workers kept")
    first.send(signal.SIGINT)
    assert first.wait() == 130
