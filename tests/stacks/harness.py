"""A training stack as a pair of scripts: one for torchrun, and the same one made elastic.

Both take ``--steps``, ``--save`` (a folder) and ``--save-every``. Rank 0 prints ``step 12 loss 0.123456789012``, the
mean over the global batch, and writes the weights after n steps as ``n.pt``: a dict of whole tensors by name.
"""

from __future__ import annotations

import difflib
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import torch

from tests.scenarios.running import EtcRun, etcd_of, wait_until

EXAMPLES: Final = Path(__file__).resolve().parents[2] / "examples"
MOST_LINES: Final = 10
STEPS: Final = 100_000
"""Neither run comes so far: the schedules of both count with it, and both are ended before."""

_FIRST_STEP = re.compile(r"generation \d+: its first step ended (\d+) ms after")
_LOSS = re.compile(r"step +(\d+) +loss +([\d.e+-]+|nan|inf)")


@dataclass(frozen=True)
class Stack:
    """`name`: of ``examples/<name>.py`` and ``examples/torchrun/<name>.py``. `options`: of both scripts.

    `start`: the config that the elastic job starts with; `sizes`: what is asked of it in turn, as at the key
    ``control/scale``. `fixed`: the processes of the job under torchrun, with `fixed_options`. `compared_with`: the
    script for torchrun, or the elastic one at that fixed size, where the former trains on other data at each size.
    `tolerance`: the most by which a loss may differ; `state_tolerance`: the same for a weight. In float64, where the
    script can: gradients are added in another order at each size, and after a hundred steps of float32 those roundings
    alone are seen in the third decimal.
    `per_rank`: the ends of names whose values depend on the rank's own samples, and so on the size: they are not
    compared.
    """

    name: str
    sizes: tuple[str, ...]
    start: str = "PP1TP1DP2"
    options: tuple[str, ...] = ()
    fixed: int = 1
    fixed_options: tuple[str, ...] = ()
    compared_with: Literal["torchrun", "itself"] = "torchrun"
    slots: int = 4
    tolerance: float = 1e-6
    state_tolerance: float = 1e-6
    per_rank: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def elastic(self) -> Path:
        return EXAMPLES / f"{self.name}.py"

    @property
    def plain(self) -> Path:
        return EXAMPLES / "torchrun" / f"{self.name}.py"


def changed_lines(stack: Stack) -> list[str]:
    """The lines of the elastic script that are new or changed; white space, blank lines, comments and the text at the
    top of the file do not count."""
    before, after = (_code_lines(path) for path in (stack.plain, stack.elastic))
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    return [line for tag, _, _, first, last in matcher.get_opcodes() if tag != "equal" for line in after[first:last]]


def _code_lines(path: Path) -> list[str]:
    text = re.sub(r'\A""".*?"""', "", path.read_text(), flags=re.DOTALL)
    lines = (" ".join(line.split()) for line in text.splitlines())
    return [line for line in lines if line and not line.startswith("#")]


@dataclass(frozen=True)
class Run:
    """What a job did. `losses`: by step. `replies`: to the requests for other sizes, in order. `folder`: with its saved
    weights. `first_steps_s`: of each change, from the end of the last step before it to that of the first after it."""

    losses: dict[int, float]
    folder: Path
    replies: tuple[dict[str, Any], ...] = ()
    first_steps_s: tuple[float, ...] = ()

    @property
    def last_saved(self) -> int:
        return max((int(path.stem) for path in self.folder.glob("*.pt")), default=0)

    def weights(self, num_steps: int) -> dict[str, torch.Tensor]:
        return torch.load(self.folder / f"{num_steps}.pt", weights_only=True, map_location="cpu")


def run_changing(stack: Stack, folder: Path, save_every: int = 10, timeout_s: float = 120.0) -> Run:
    """Train with `etc-run` on a private etcd, ask for each of `stack.sizes` once the one before is there, and end the
    job when weights have been saved after the last."""
    saved = _made(folder / "changing")
    job = EtcRun(
        "--standalone", "--nproc-per-node", stack.slots, "--rdzv-id", "job", "--parallel", stack.start, stack.elastic,
        *_options(stack, saved, save_every), cwd=folder, environment={"ETC_SPARES": "warm", **stack.environment},
    )
    try:
        etcd, replies = etcd_of(job), []
        _wait_for_steps(job, 3, timeout_s)
        for size in stack.sizes:
            etcd.scale(size)
            replies.append(etcd.reply_to(size, "done", "refused", "failed", timeout_s=timeout_s))
            _wait_for_steps(job, 3, timeout_s)
        before = Run({}, saved).last_saved
        wait_until(lambda: Run({}, saved).last_saved > before + save_every, "weights after the last change", timeout_s)
        stops = tuple(int(ms) / 1e3 for ms in _FIRST_STEP.findall(job.output))
        return Run(_losses(job), saved, tuple(replies), stops)
    finally:
        job.kill()


def run_fixed(stack: Stack, folder: Path, num_steps: int, save_every: int = 10, timeout_s: float = 300.0) -> Run:
    """Train under torchrun until the weights after `num_steps` steps are saved."""
    saved = _made(folder / "fixed")
    script = stack.plain if stack.compared_with == "torchrun" else stack.elastic
    job = EtcRun(
        "--standalone", "--nproc-per-node", stack.fixed, script, *_options(stack, saved, save_every),
        *stack.fixed_options, cwd=folder, launcher="torchrun",
    )
    try:
        job.wait_for(rf"step +{num_steps} +loss", timeout_s)
        return Run(_losses(job), saved)
    finally:
        job.kill()


def step_s(launcher: str, stack: Stack, folder: Path, num_processes: int, num_steps: int, timeout_s: float) -> float:
    """Seconds per step at a fixed size: of the script for torchrun under it, or of the elastic one under etc-run."""
    script = stack.plain if launcher == "torchrun" else stack.elastic
    job = EtcRun(
        "--standalone", "--nproc-per-node", num_processes, script, *_options(stack, folder, STEPS), cwd=folder,
        launcher=launcher,
    )
    try:
        _wait_for_steps(job, num_steps // 2, timeout_s)
        before, began = max(_losses(job)), time.monotonic()
        _wait_for_steps(job, num_steps, timeout_s)
        return (time.monotonic() - began) / (max(_losses(job)) - before)
    finally:
        job.kill()


def differences(stack: Stack, changing: Run, fixed: Run) -> tuple[float, float]:
    """The largest difference of a loss, and of a weight after the last steps that both have saved."""
    steps = changing.losses.keys() & fixed.losses.keys()
    assert len(steps) >= changing.last_saved, "steps are missing"
    ours, theirs = (run.weights(min(changing.last_saved, fixed.last_saved)) for run in (changing, fixed))
    assert ours.keys() == theirs.keys()
    compared = [name for name in ours if not name.endswith(stack.per_rank or ("\n",))]
    of_weights = max((ours[name].double() - theirs[name].double()).abs().max().item() for name in compared)
    return max(abs(changing.losses[step] - fixed.losses[step]) for step in steps), of_weights


def assert_same(stack: Stack, changing: Run, fixed: Run) -> None:
    """Every change was made, and losses and weights are those of the unchanged run."""
    results = [reply["result"] for reply in changing.replies]
    assert results == ["done"] * len(stack.sizes), changing.replies
    loss, weight = differences(stack, changing, fixed)
    assert loss <= stack.tolerance, f"losses differ by {loss}"
    assert weight <= stack.state_tolerance, f"weights differ by {weight}"


def _options(stack: Stack, saved: Path, save_every: int) -> Sequence[object]:
    return (*stack.options, "--steps", STEPS, "--save", saved, "--save-every", save_every)


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _losses(job: EtcRun) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in _LOSS.findall(job.output)}


def _wait_for_steps(job: EtcRun, count: int, timeout_s: float) -> None:
    """So many more than are printed now."""
    wanted = max(_losses(job), default=-1) + count
    deadline = time.monotonic() + timeout_s

    def has_come() -> bool:
        assert job.process.poll() is None, f"the job ended:\n{job.output}"
        return max(_losses(job), default=-1) >= wanted

    wait_until(has_come, f"step {wanted} of:\n{job.output}", deadline - time.monotonic())
