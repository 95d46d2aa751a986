"""Idle slots hold warm spares, which become workers at once and are no part of the job before."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from running import TINY_JOB, EtcRun, etcd_of, standalone, steps_of, wait_for_step, wait_until

Cleanup = Callable[[EtcRun], EtcRun]
SPARE = "etc_agent.worker.spare"


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
    os.kill(first, signal.SIGKILL)
    job.wait_for("the spare in slot 1 ended")
    spare = warm_spare_of(job, but=first)
    etcd.scale("2")
    etcd.reply_to("2", "done")
    wait_until(lambda: any(line["pid"] == spare for line in steps_of(tmp_path)), "steps of the spare's process")
    assert (tmp_path / "logs" / "job" / "generation_2" / etcd.get("status")["nodes"][0] / "1" / "stderr.log").exists()
    assert etcd.get("current")["restarts"] == 0
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
        "warm = 'worker.spare' in pathlib.Path('/proc/self/cmdline').read_text()\n"
        "pathlib.Path(f'seen-{\"warm\" if warm else \"cold\"}-{os.getpid()}').write_text(json.dumps(look()))\n"
        "while not (warm and os.environ['WORLD_SIZE'] == '2'): time.sleep(0.05)\n"
        "raise ValueError('in a spare')\n"
    )
    options = ("--parallel", "PP1TP1DP1", "--rdzv-conf", "start_s=1")
    job = cleanup(standalone(tmp_path, *how, "an argument", slots=2, options=options))
    warm_spare_of(job)
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
