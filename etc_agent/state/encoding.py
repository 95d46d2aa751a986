"""Layouts and manifests as compact JSON values, for the control socket and the manifest exchange."""

from __future__ import annotations

from typing import Any

from etc_agent.state.boxes import Box
from etc_agent.state.layout import Layout, LogicalTensor, Manifest, Shard


def encode_layout(layout: Layout) -> dict[str, Any]:
    """``{"tensors": [[name, shape, dtype, itemsize] ...], "ranks": [[[tensor index, offset, shape] ...] ...]}``."""
    tensors = {tensor: index for index, tensor in enumerate(dict.fromkeys(s.tensor for m in layout for s in m))}
    return {
        "tensors": [[t.name, list(t.shape), t.dtype, t.itemsize] for t in tensors],
        "ranks": [
            [[tensors[shard.tensor], list(shard.box.offset), list(shard.box.shape)] for shard in manifest]
            for manifest in layout
        ],
    }


def decode_layout(value: dict[str, Any]) -> Layout:
    """The layout in a value of `encode_layout`.

    Raises:
        ValueError: the value is not one.
    """
    try:
        tensors = [LogicalTensor(name, tuple(shape), dtype, size) for name, shape, dtype, size in value["tensors"]]
        return tuple(
            tuple(Shard(tensors[index], Box(tuple(offset), tuple(shape))) for index, offset, shape in manifest)
            for manifest in value["ranks"]
        )
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(f"not an encoded layout: {error!r}") from None


def encode_manifest(manifest: Manifest) -> dict[str, Any]:
    """A layout of one rank."""
    return encode_layout((manifest,))


def decode_manifest(value: dict[str, Any]) -> Manifest:
    (manifest,) = decode_layout(value)
    return manifest
