"""Layouts and manifests as compact JSON values, for the control socket and the exchange of copies.

Ranks with equal manifests are written once, and the names of a model repeat: a layout of 4,096 ranks of a large model
takes some tens of kilobytes.
"""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from typing import Any

from etc_agent.state.boxes import Box
from etc_agent.state.layout import Layout, LogicalTensor, Manifest, Shard

_LARGEST_BYTES = 1 << 30


def encode_layout(layout: Layout) -> dict[str, Any]:
    """``{"packed": text}``: compressed JSON of ``{"tensors": [[name, shape, dtype, itemsize] ...], "manifests":
    [[[offset, shape, [tensor index ...]] ...] ...], "ranks": [manifest index ...]}``. The tensors with one box are
    written together."""
    numbers: dict[int, int] = {}
    indexes: dict[Manifest, int] = {}
    ranks = []
    for manifest in layout:
        if id(manifest) not in numbers:
            numbers[id(manifest)] = indexes.setdefault(manifest, len(indexes))
        ranks.append(numbers[id(manifest)])
    tensors = {tensor: index for index, tensor in enumerate(dict.fromkeys(s.tensor for m in indexes for s in m))}
    value = {
        "tensors": [[t.name, list(t.shape), t.dtype, t.itemsize] for t in tensors],
        "manifests": [_boxes(manifest, tensors) for manifest in indexes],
        "ranks": ranks,
    }
    text = json.dumps(value, separators=(",", ":")).encode()
    return {"packed": base64.b64encode(zlib.compress(text, 6)).decode()}


def _boxes(manifest: Manifest, tensors: dict[LogicalTensor, int]) -> list[Any]:
    found: list[Any] = []
    for shard in manifest:
        box = [list(shard.box.offset), list(shard.box.shape)]
        if not found or found[-1][:2] != box:
            found.append([*box, []])
        found[-1][2].append(tensors[shard.tensor])
    return found


def decode_layout(value: dict[str, Any]) -> Layout:
    """The layout in a value of `encode_layout`.

    Raises:
        ValueError: the value is not one.
    """
    try:
        packed = zlib.decompressobj()
        text = packed.decompress(base64.b64decode(value["packed"], validate=True), _LARGEST_BYTES)
        if not packed.eof:
            raise ValueError(f"not an encoded layout: cut off, or larger than {_LARGEST_BYTES:,} bytes")
        plain = json.loads(text)
        tensors = [LogicalTensor(name, tuple(shape), dtype, size) for name, shape, dtype, size in plain["tensors"]]
        manifests = [
            tuple(Shard(tensors[index], Box(tuple(offset), tuple(shape)))
                  for offset, shape, indexes in manifest for index in indexes)
            for manifest in plain["manifests"]
        ]
        return tuple(manifests[index] for index in plain["ranks"])
    except (KeyError, IndexError, TypeError, AttributeError, binascii.Error, zlib.error) as error:
        raise ValueError(f"not an encoded layout: {error!r}") from None


def encode_manifest(manifest: Manifest) -> dict[str, Any]:
    """A layout of one rank."""
    return encode_layout((manifest,))


def decode_manifest(value: dict[str, Any]) -> Manifest:
    (manifest,) = decode_layout(value)
    return manifest
