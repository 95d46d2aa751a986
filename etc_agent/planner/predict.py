"""Predicted time of a training step and memory of a rank under a parallel config.

A model of the first order, meant to rank configs, not to forecast: every formula is here, every constant is in
`Device` and `Training`.

* compute: 6 * parameters + 12 * layers * hidden * sequence flops per token (forward and backward; Narayanan et al.,
  "Efficient Large-Scale Language Model Training on GPU Clusters", 2021), at a constant efficiency;
* pipeline bubble: (pp - 1) / (micro-batches * interleave) of the compute;
* tp: 4 all-reduces of a micro-batch's activations per layer, over the node's fabric where the group fits in a node;
* dp: reduce-scatter and all-gather of the gradients, over the NICs when the group spans nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from etc_agent.parallel.config import ParallelConfig
from etc_agent.parallel.topology import Topology
from etc_agent.planner.choose import NoConfigError, every_config
from etc_agent.state.model import ModelDescription
from etc_agent.state.sharding import Sharding, refusal

_ACTIVATION_BYTES = 34
"""Bytes per token, hidden unit and layer with selective recomputation (Korthikanti et al. 2022)."""


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator. `flops_per_s` in the training dtype; `fabric_bytes_per_s` between slots of a node."""

    memory_bytes: int = 80 << 30
    flops_per_s: float = 989e12
    efficiency: float = 0.45
    fabric_bytes_per_s: float = 450e9


@dataclass(frozen=True, slots=True)
class Training:
    """What a step processes: `global_batch` sequences, in micro-batches of `micro_batch` per replica."""

    global_batch: int = 256
    micro_batch: int = 1
    interleave: int = 1


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds of a step by cause, and bytes of the fullest rank."""

    config: ParallelConfig
    compute_s: float
    bubble_s: float
    tp_s: float
    dp_s: float
    memory_bytes: int

    @property
    def step_s(self) -> float:
        return self.compute_s + self.bubble_s + self.tp_s + self.dp_s

    def __str__(self) -> str:
        return (
            f"{self.config}: step {self.step_s:.3g} s (compute {self.compute_s:.3g}, bubble {self.bubble_s:.3g}, "
            f"tp {self.tp_s:.3g}, dp {self.dp_s:.3g}), {self.memory_bytes / (1 << 30):.1f} GiB"
        )


def predict(
    model: ModelDescription, config: ParallelConfig, topology: Topology, device: Device, training: Training
) -> Prediction:
    """Step time and memory. Raises ValueError where the model or the batch cannot be cut so."""
    reason = refusal(model, config, interleave=training.interleave)
    replicas = config.dp
    if reason is None and training.global_batch % (replicas * training.micro_batch):
        reason = (
            f"a global batch of {training.global_batch} is not divisible by dp={replicas} times "
            f"micro-batches of {training.micro_batch}"
        )
    if reason is not None:
        raise ValueError(reason)
    num_micro = training.global_batch // (replicas * training.micro_batch)
    tokens = training.global_batch * model.sequence
    active = _active_parameters(model)
    flops = tokens * (6 * active + 12 * model.num_layers * model.hidden * model.sequence)
    compute = flops / config.num_ranks / (device.flops_per_s * device.efficiency)
    bubble = compute * (config.pp - 1) / (num_micro * training.interleave)
    widest = max((node.num_slots for node in topology.nodes), default=1)
    nic = min(node.num_nics * node.nic_bytes_per_s / node.num_slots for node in topology.nodes)
    tp_link = device.fabric_bytes_per_s if config.tp * config.cp <= widest else nic
    activation = training.micro_batch * model.sequence // config.cp * model.hidden * 2
    layers = -(-model.num_layers // config.pp)
    tp = 4 * layers * num_micro * _all_reduce(activation, config.tp, tp_link)
    state = rank_state_bytes(model, config)
    parameters = state // model.bytes_per_parameter
    dp_link = device.fabric_bytes_per_s if config.tp * config.cp * replicas <= widest else nic
    dp = _all_reduce(parameters * 4, replicas * config.cp, dp_link)
    if model.zero1:
        kept = sum(kind.itemsize for kind in model.kinds if not kind.sharded)
        state = parameters * kept + parameters * (model.bytes_per_parameter - kept) // (replicas * config.cp)
    in_flight = min(config.pp, num_micro) * training.micro_batch
    activations = in_flight * model.sequence // config.cp * model.hidden * layers * _ACTIVATION_BYTES // config.tp
    return Prediction(config, compute, bubble, tp, dp, state + parameters * 4 + activations)


def _all_reduce(num_bytes: float, size: int, bytes_per_s: float) -> float:
    """A ring: every rank sends 2 (size - 1) / size of the buffer."""
    return 2 * (size - 1) / size * num_bytes / bytes_per_s


def _active_parameters(model: ModelDescription) -> int:
    """Parameters that a token passes through; the word embedding is a lookup, the head a product."""
    layer = 0
    for spec in model.layer_specs():
        size = 1
        for extent in spec.shape:
            size *= extent
        if spec.expert is None or spec.expert < model.experts_per_token:
            layer += size
    return layer * model.num_layers + model.vocab * model.hidden


def rank_state_bytes(model: ModelDescription, config: ParallelConfig) -> int:
    """Bytes of parameters and optimizer state on the fullest stage, without ZeRO-1."""
    sharding = Sharding(model, config)
    per_stage = [0] * config.pp
    for specs, repeats in sharding.sections():
        size = sum(
            box.num_elements for spec in specs if spec.expert is None or sharding.expert_home(spec.expert) == 0
            for box in sharding.boxes(spec, 0)
        )
        for stages in repeats:
            for stage in stages:
                per_stage[stage] += size
    return max(per_stage) * model.bytes_per_parameter


@dataclass(frozen=True, slots=True)
class Choice:
    """`ranking`: feasible configs, the best first; `refused`: (config, why); `migration_s`: config -> tie-breaker."""

    ranking: tuple[Prediction, ...]
    refused: tuple[tuple[ParallelConfig, str], ...]
    migration_s: tuple[float, ...]

    @property
    def best(self) -> ParallelConfig:
        return self.ranking[0].config

    def explain(self, limit: int = 5) -> str:
        """Why the first was taken, in a few lines."""
        lines = [f"chosen {self.ranking[0]}"]
        for number in range(1, min(limit, len(self.ranking))):
            prediction, seconds = self.ranking[number], self.migration_s[number]
            slower = prediction.step_s / self.ranking[0].step_s - 1
            lines.append(f"{number + 1}. {prediction}; step {slower:+.1%}, migration {seconds:.3g} s")
        if self.refused:
            config, reason = self.refused[0]
            lines.append(f"{len(self.refused)} refused, such as {config}: {reason}")
        return "\n".join(lines)


Ranker = Callable[[Prediction, float], tuple[float, ...]]
"""Sort key of a feasible config from its prediction and the predicted seconds of the migration to it."""


def by_step_time(prediction: Prediction, migration_s: float) -> tuple[float, ...]:
    """Step times within a percent are equal; then the cheaper migration."""
    return (float(f"{prediction.step_s:.2g}"), migration_s, prediction.step_s)


def rank_configs(
    model: ModelDescription,
    num_slots: int,
    topology: Topology,
    *,
    device: Device | None = None,
    training: Training | None = None,
    allowed: Sequence[ParallelConfig] | None = None,
    migration_s: Callable[[ParallelConfig], float] | None = None,
    ranker: Ranker = by_step_time,
) -> Choice:
    """All configs of at most `num_slots` ranks that train within memory, ranked.

    `allowed`: the only ones to consider; None for every split of `num_slots`, or of the most slots below it that any
    config can use. `migration_s`: predicted seconds of the change to a config. `ranker`: replaces the order.

    Raises:
        NoConfigError: none is feasible; says why.
    """
    device, training = device or Device(), training or Training()
    refused: list[tuple[ParallelConfig, str]] = []
    for num_ranks in range(num_slots, 0, -1):
        if allowed is None:
            options = every_config(num_ranks)
        else:
            options = [config for config in allowed if config.num_ranks == num_ranks]
        found: list[tuple[Prediction, float]] = []
        for config in options:
            try:
                prediction = predict(model, config, topology, device, training)
            except ValueError as error:
                refused.append((config, str(error)))
                continue
            if prediction.memory_bytes > device.memory_bytes:
                need, have = prediction.memory_bytes / (1 << 30), device.memory_bytes / (1 << 30)
                refused.append((config, f"needs {need:.1f} GiB per rank, there are {have:.1f}"))
                continue
            found.append((prediction, migration_s(config) if migration_s else 0.0))
        if found:
            found.sort(key=lambda item: (*ranker(*item), str(item[0].config)))
            return Choice(tuple(p for p, _ in found), tuple(refused), tuple(s for _, s in found))
    reasons = "; ".join(f"{config}: {reason}" for config, reason in refused[:4]) or "none is allowed"
    raise NoConfigError(f"no parallel config of {model.name} fits {num_slots} slots; {reasons}")
