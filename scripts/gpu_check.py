"""Everything about migration that one GPU can show, in under five minutes. Works with torch 2.11 and later.

    python scripts/gpu_check.py

Each check prints what it proved; the last line is one JSON object, and the exit code is 1 if any check failed. What one
GPU cannot show: NCCL between workers, and bandwidth between devices.
"""

from __future__ import annotations

import datetime
import json
import multiprocessing
import multiprocessing.connection
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import etc_agent
from etc_agent.migration.keep import KeepingMigration
from etc_agent.migration.release import ReleasingMigration
from etc_agent.migration.release_plan import plan_release
from etc_agent.migration.transport.wire import Wire
from etc_agent.planner.transfers.migration import make_plan
from etc_agent.state.boxes import Box, whole
from etc_agent.state.layout import LogicalTensor, Manifest, Shard

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64, torch.bool)
_CUDA = torch.device("cuda", 0)
_LIMIT_S = 120.0


def main() -> int:
    if not torch.cuda.is_available():
        print("no GPU here: nothing was checked", file=sys.stderr)
        return 2
    results: dict[str, str] = {}
    start = time.perf_counter()
    for check in (
        cuda_over_gloo_between_processes,
        nccl_with_one_rank,
        release_stays_inside_its_budget,
        the_stream_order_is_kept,
        the_context_lives_and_graphs_are_captured_again,
    ):
        began = time.perf_counter()
        try:
            results[check.__name__] = f"ok: {check()}"
        except Exception as error:
            traceback.print_exc()
            results[check.__name__] = f"FAILED: {type(error).__name__}: {error}"
        print(f"{check.__name__}: {results[check.__name__]} ({time.perf_counter() - began:.1f} s)", flush=True)
    passed = all(result.startswith("ok") for result in results.values())
    print(
        json.dumps(
            {
                "passed": passed,
                "gpu": torch.cuda.get_device_name(0),
                "torch": torch.__version__,
                "seconds": round(time.perf_counter() - start, 1),
                "checks": results,
            }
        )
    )
    return 0 if passed else 1


# -- checks


def cuda_over_gloo_between_processes() -> str:
    """Two processes on one device exchange CUDA tensors of every dtype through pinned buffers, in both modes."""
    outcomes = _in_processes(_exchange_on_gpu, 2)
    assert all(wrong == [] for wrong, _ in outcomes), outcomes
    return f"{sum(count for _, count in outcomes)} CUDA shards arrived bit for bit, in keep and in release mode"


def _exchange_on_gpu(rank: int, size: int, store: dist.Store) -> tuple[list[str], int]:
    torch.cuda.set_device(0)
    group = _gloo(store, rank, size)
    old, new = _layouts()
    wrong, count = [], 0
    for mode in ("keep", "release"):
        have = {shard: _slice(shard).to(_CUDA) for shard in old[rank]}
        found = etc_agent.migrate(have, new[rank], group, mode=mode, device=_CUDA, verify=True, timeout_s=60)
        count += len(found)
        wrong += [f"{mode} {shard.tensor.name}" for shard, tensor in found.items() if not _is_right(shard, tensor)]
    return wrong, count


def nccl_with_one_rank() -> str:
    """A one-rank NCCL group: collectives of prepare, local copies, and a grouped launch of a send to itself."""
    group = _nccl()
    tensor = LogicalTensor("w", (1024, 512), "bfloat16", 2)
    half = Shard(tensor, Box((0, 0), (512, 512)))
    source = _slice(Shard(tensor, whole(tensor.shape))).to(_CUDA)
    have = {Shard(tensor, whole(tensor.shape)): source}
    target = {half: torch.zeros(512, 512, dtype=torch.bfloat16, device=_CUDA)}
    migration = KeepingMigration(make_plan([tuple(have)], [(half,)]), 0, have, target, group, timeout_s=60)
    migration.prepare()
    migration.run()
    assert _is_right(half, target[half])
    wire = Wire(group)
    sent = torch.arange(1 << 20, device=_CUDA).view(torch.uint8)
    arrived = torch.zeros_like(sent)
    received, posted = wire.post([(0, 1, arrived)], [(0, 1, sent)])
    for work in (*received, *posted):
        work.wait(datetime.timedelta(seconds=30))
    torch.cuda.synchronize()
    assert torch.equal(sent, arrived)
    return "prepare, local copies and a grouped send and receive over NCCL"


def release_stays_inside_its_budget() -> str:
    """The allocator's own peak against the budget that was promised."""
    count, side = 16, 2048
    tensors = [LogicalTensor(f"w{n}", (side, side), "float32", 4) for n in range(count)]
    old: list[Manifest] = [tuple(Shard(t, whole(t.shape)) for t in tensors)]
    new: list[Manifest] = [tuple(Shard(t, Box((0, 0), (side // 2, side))) for t in tensors)]
    torch.cuda.empty_cache()
    base = torch.cuda.memory_allocated()
    have = {shard: _slice(shard).to(_CUDA) for shard in old[0]}
    before = torch.cuda.memory_allocated() - base
    migration = ReleasingMigration(plan_release(old, new), 0, have, _nccl(), timeout_s=60, device=_CUDA)
    migration.prepare()
    torch.cuda.reset_peak_memory_stats()
    migration.run()
    peak = torch.cuda.max_memory_allocated() - base
    after = torch.cuda.memory_allocated() - base
    assert peak <= migration.budget_bytes, (peak, migration.budget_bytes)
    assert after <= before // 2 + (1 << 20), (after, before)
    assert all(_is_right(shard, migration.targets[shard]) for shard in new[0])
    budget = migration.budget_bytes
    return f"peak {peak / before:.3f} of the old state, budget {budget / before:.3f}, after {after / before:.3f}"


def the_stream_order_is_kept() -> str:
    """A migration that is run while kernels are queued moves what those kernels will have written."""
    tensor = LogicalTensor("w", (4096, 1024), "float32", 4)
    shard, part = Shard(tensor, whole(tensor.shape)), Shard(tensor, Box((0, 0), (2048, 1024)))
    source = torch.zeros(tensor.shape, device=_CUDA)
    target = torch.zeros(2048, 1024, device=_CUDA)
    plan = make_plan([(shard,)], [(part,)])
    migration = KeepingMigration(plan, 0, {shard: source}, {part: target}, _nccl(), timeout_s=60)
    migration.prepare()
    busy = torch.randn(4096, 4096, device=_CUDA)
    queued = torch.cuda.Event()
    for _ in range(50):
        busy = torch.tanh(busy @ busy)
    source.fill_(7)
    queued.record()
    was_pending = not queued.query()
    migration.run()
    doubled = target * 2  # on the training stream, right after
    torch.cuda.synchronize()
    assert bool((doubled == 14).all())
    return f"values written by kernels queued before the migration were moved (pending when it began: {was_pending})"


def the_context_lives_and_graphs_are_captured_again() -> str:
    """One process, one CUDA context: train by a CUDA graph, change the parameter's storage, capture again, go on."""
    tensor = LogicalTensor("w", (512, 256), "float32", 4)
    old, new = Shard(tensor, whole(tensor.shape)), Shard(tensor, Box((0, 0), (256, 256)))
    weight = _slice(old).to(_CUDA)
    weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)).to(_CUDA))
    given = torch.randn(32, 256, device=_CUDA)
    uses_before = torch.cuda.memory_stats()["allocation.all.allocated"]
    graph, product = _capture(given, weight)
    graph.replay()
    torch.cuda.synchronize()
    reference = product[:, :256].clone()
    target = torch.empty(256, 256, device=_CUDA)
    migration = KeepingMigration(make_plan([(old,)], [(new,)]), 0, {old: weight}, {new: target}, _nccl(), timeout_s=60)
    migration.prepare()
    migration.run()
    again, smaller = _capture(given, target)
    again.replay()
    torch.cuda.synchronize()
    assert torch.allclose(smaller, reference, rtol=1e-4, atol=1e-4)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] > uses_before  # the allocator was never reset
    return "a graph captured on migrated storage gives the same product in the same CUDA context"


def _capture(given: torch.Tensor, weight: torch.Tensor) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        given @ weight.t()  # libraries set themselves up outside the capture
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        product = given @ weight.t()
    return graph, product


# -- helpers


def _layouts() -> tuple[list[Manifest], list[Manifest]]:
    """Worker 0 holds everything; then the two split rows of one half of the tensors and columns of the other."""
    old: list[Shard] = []
    new: tuple[list[Shard], list[Shard]] = ([], [])
    for dtype in _DTYPES:
        for dim in (0, 1):
            name = str(dtype).removeprefix("torch.")
            tensor = LogicalTensor(f"{name}.{dim}", (1024, 768), name, dtype.itemsize)
            old.append(Shard(tensor, whole(tensor.shape)))
            extent = [1024, 768]
            extent[dim] //= 2
            for rank in (0, 1):
                offset = [0, 0]
                offset[dim] = rank * extent[dim]
                new[rank].append(Shard(tensor, Box(tuple(offset), tuple(extent))))
    return [tuple(old), ()], [tuple(new[0]), tuple(new[1])]


def _slice(shard: Shard) -> torch.Tensor:
    """Random bits that depend on the tensor's name alone, sliced."""
    tensor = shard.tensor
    generator = torch.Generator().manual_seed(sum(map(ord, tensor.name)))
    bits = torch.randint(0, 2 if tensor.dtype == "bool" else 256, (*tensor.shape, tensor.itemsize), generator=generator)
    full = bits.to(torch.uint8).view(getattr(torch, tensor.dtype)).reshape(tensor.shape)
    return full[shard.box.within(whole(tensor.shape))].clone()


def _is_right(shard: Shard, tensor: torch.Tensor) -> bool:
    bits = torch.uint8
    return torch.equal(tensor.cpu().contiguous().view(bits), _slice(shard).contiguous().view(bits))


def _gloo(store: dist.Store, rank: int, size: int) -> Any:
    return dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, datetime.timedelta(seconds=60))


def _nccl() -> Any:
    torch.cuda.set_device(0)
    return dist.ProcessGroupNCCL(dist.HashStore(), 0, 1)


def _in_processes(function: Callable[..., Any], size: int) -> list[Any]:
    """``function(rank, size, store)`` in fresh processes, all ended on return."""
    context = multiprocessing.get_context("spawn")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    children = []
    for rank in range(size):
        ours, theirs = context.Pipe(duplex=False)
        child = context.Process(target=_child, args=(theirs, function, rank, size, store.port), daemon=True)
        child.start()
        theirs.close()
        children.append((child, ours))
    try:
        answers = []
        for rank, (_, pipe) in enumerate(children):
            if not pipe.poll(_LIMIT_S):
                raise TimeoutError(f"process {rank} gave no answer within {_LIMIT_S:g} s")
            failed, answer = pipe.recv()
            if failed:
                raise RuntimeError(f"process {rank} failed:\n{answer}")
            answers.append(answer)
        return answers
    finally:
        for child, _ in children:
            child.join(5)
            if child.is_alive():
                child.kill()


def _child(
    pipe: multiprocessing.connection.Connection, function: Callable[..., Any], rank: int, size: int, port: int
) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        pipe.send((False, function(rank, size, dist.TCPStore("127.0.0.1", port, is_master=False))))
    except Exception:
        pipe.send((True, traceback.format_exc()))


if __name__ == "__main__":
    sys.exit(main())
