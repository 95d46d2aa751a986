"""What to train and how: the command line's options, checked once."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Self

from etc_agent.parallel.config import ParallelConfig

VOCABULARY = 256


class OptionsError(ValueError):
    """Options that cannot work, or not with this parallel config: one line for the user."""


@dataclass(frozen=True, slots=True)
class GptOptions:
    """A GPT over bytes and its training recipe. `hidden` is the width, `sequence` the tokens of a sample.

    `microbatch`: samples of one forward pass, the same in every parallel config, so that configs differ in the order of
    sums alone. `clip`: largest global gradient norm, 0 for no clipping.

    Raises:
        OptionsError: the options contradict each other.
    """

    layers: int = 4
    hidden: int = 128
    heads: int = 4
    sequence: int = 128
    dropout: float = 0.0
    steps: int = 200
    global_batch: int = 32
    microbatch: int = 4
    lr: float = 3e-3
    warmup: int = 20
    weight_decay: float = 0.01
    clip: float = 0.0
    seed: int = 1234
    data: Path | None = None

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "sequence", "global_batch", "microbatch"):
            if getattr(self, name) < 1:
                raise OptionsError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(self, name)}")
        if self.hidden % self.heads or self.hidden // self.heads % 2:
            raise OptionsError(
                f"--hidden {self.hidden} over --heads {self.heads} must give heads of an even width; "
                f"use a multiple of {2 * self.heads}"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise OptionsError(f"--dropout must be in 0 .. 1, not {self.dropout}")

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Add one ``--name`` per field, with its default."""
        for option in fields(cls):
            kind = Path if option.name == "data" else type(option.default)
            flag = f"--{option.name.replace('_', '-')}"
            parser.add_argument(flag, type=kind, default=option.default, help=_HELP.get(option.name))

    @classmethod
    def from_arguments(cls, arguments: argparse.Namespace) -> Self:
        return cls(**{option.name: getattr(arguments, option.name) for option in fields(cls)})

    def num_microbatches(self, config: ParallelConfig) -> int:
        """Microbatches of a step on each dp rank of `config`."""
        return self.global_batch // config.dp // self.microbatch

    def check(self, config: ParallelConfig) -> None:
        """Check that the model can be trained with `config`.

        Raises:
            OptionsError: it cannot; the message says why in one line.
        """
        if self.heads % config.tp:
            raise OptionsError(
                f"{config}: {self.heads} heads cannot be divided over tp={config.tp}; choose a tp that divides them"
            )
        if self.layers < config.pp:
            raise OptionsError(
                f"{config}: {self.layers} layers cannot fill pp={config.pp} stages; choose pp <= {self.layers}"
            )
        if self.global_batch % (config.dp * self.microbatch):
            raise OptionsError(
                f"{config}: a global batch of {self.global_batch} cannot be divided over dp={config.dp} into "
                f"microbatches of {self.microbatch}; make it a multiple of {config.dp * self.microbatch}"
            )
        if self.num_microbatches(config) < config.pp:
            raise OptionsError(
                f"{config}: {self.num_microbatches(config)} microbatches per dp rank cannot keep pp={config.pp} stages "
                f"busy; choose --global-batch >= {config.dp * self.microbatch * config.pp} or a smaller --microbatch"
            )
        if self.dropout and config.tp > 1:
            raise OptionsError(
                f"{config}: --dropout {self.dropout} needs tp=1, since tp ranks draw different random numbers"
            )


_HELP = {
    "data": "text file, or folder whose files are read; default: the Python standard library's source on this machine",
    "microbatch": "samples of one forward pass",
    "clip": "largest global gradient norm, 0 for no clipping",
}
