"""The weak references that recurrent modules keep to their weights; a tensor that has one cannot be swapped."""

from __future__ import annotations

from torch import nn

NAMES = ("torch.nn.RNNBase._init_flat_weights",)


def forget_weights(module: nn.RNNBase) -> None:
    """Drop `module`'s references to its weights, until `find_weights`."""
    # Set in __init__ alone, so that NAMES cannot list it: find_weights makes it again.
    vars(module)["_flat_weight_refs"] = []


def find_weights(module: nn.RNNBase) -> None:
    """Let `module` refer to the weights that are registered now."""
    module._init_flat_weights()
