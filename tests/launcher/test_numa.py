"""--numa-binding: each worker is bound by its own slot, programs with numactl and functions from inside."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from torch.numa import binding
from torch.numa.binding import AffinityMode, NumaOptions

from etc_agent.agent.processes.numa import bind_here, bound
from etc_agent.errors import EtcError

OPTIONS = NumaOptions(AffinityMode.NODE)


@pytest.fixture
def numactl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with numactl, whether or not this one has it."""
    program = tmp_path / "numactl"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.fixture
def near(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with accelerators: CPUs 10 k and 10 k + 1 are near accelerator k."""

    def cpus(*, gpu_index: int, numa_options: NumaOptions) -> set[int]:
        return {10 * gpu_index, 10 * gpu_index + 1}

    monkeypatch.setattr(binding, "_get_validated_logical_cpus_to_bind_to", cpus)


@pytest.mark.usefixtures("numactl", "near")
def test_a_program_is_bound_near_the_accelerator_of_its_slot() -> None:
    assert bound("python", ("-u", "train.py"), 3, None) == ("python", ("-u", "train.py"))
    assert bound("python", ("-u", "train.py"), 3, OPTIONS) == (
        "numactl", ("--physcpubind=30-31", "python", "-u", "train.py")
    )


def test_a_process_that_runs_a_function_is_bound_from_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    here = min(os.sched_getaffinity(0))
    before = os.sched_getaffinity(0)

    def cpus(*, gpu_index: int, numa_options: NumaOptions) -> set[int]:
        return {here} if gpu_index == 2 else set()

    monkeypatch.setattr(binding, "_get_validated_logical_cpus_to_bind_to", cpus)
    try:
        bind_here(2, None)
        assert os.sched_getaffinity(0) == before
        bind_here(2, OPTIONS)
        assert os.sched_getaffinity(0) == {here}
    finally:
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), before)


@pytest.mark.usefixtures("numactl")
def test_a_binding_that_cannot_be_is_one_line() -> None:
    with pytest.raises(EtcError, match="--numa-binding=node: no CPUs were found near accelerator 999"):
        bound("python", (), 999, OPTIONS)


def test_without_numactl_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(EtcError, match="apt-get install numactl"):
        bound("python", (), 0, OPTIONS)
