"""One generation's manifests by class: workers with equal manifests share one description.

In a model that is cut by pp and tp and copied by dp there are pp * tp classes, however many workers there are. A tensor
that each worker has one of its own of (a random stream) is described by a *relative* name, which ends in the worker's
place in the grid.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from etc_agent.planner.transfers.demands import Workers
from etc_agent.state.boxes import Box
from etc_agent.state.layout import LogicalTensor, Manifest, Shard

PLACE = "{place}"
"""Stands for the worker's place at the end of a relative name."""


@dataclass(frozen=True, slots=True, eq=False)
class Alike:
    """Tensors of one shape, dtype and itemsize of which a worker has the same box."""

    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    box: Box
    names: frozenset[str]

    def logical(self, name: str) -> LogicalTensor:
        return LogicalTensor(name, self.shape, self.dtype, self.itemsize)


@dataclass(frozen=True, slots=True, eq=False)
class ManifestClass:
    """The manifest of every worker of a class. `relative`: prefix of a relative name -> its tensor."""

    absolute: tuple[Alike, ...]
    relative: Mapping[str, Alike]

    @classmethod
    def decoded(cls, text: bytes) -> ManifestClass:
        """From a value of `encode_class`."""
        absolute, relative = [], {}
        for shape, dtype, itemsize, offset, extent, names in json.loads(text):
            box = Box(tuple(offset), tuple(extent))
            alike = Alike(tuple(shape), dtype, itemsize, box, frozenset(names))
            places = [name for name in names if name.endswith(PLACE)]
            relative.update({name.removesuffix(PLACE): alike for name in places})
            if len(places) < len(names):
                absolute.append(alike)
        return cls(tuple(absolute), relative)

    def names(self) -> set[str]:
        """All tensors, without those that each worker has one of its own of."""
        return {name for alike in self.absolute for name in alike.names if not name.endswith(PLACE)}

    def manifest(self, place: str = "") -> Manifest:
        """Of the worker at this place."""
        return tuple(
            Shard(alike.logical(name), alike.box)
            for alike in dict.fromkeys((*self.absolute, *self.relative.values()))
            for name in sorted(name.removesuffix(PLACE) + place if name.endswith(PLACE) else name
                               for name in alike.names)
        )


def encode_class(manifest: Manifest, place: str | None = None) -> bytes:
    """JSON, equal for all workers of a class. `place`: of the worker that has this manifest."""
    alike: dict[tuple[Any, ...], list[str]] = {}
    for shard in manifest:
        tensor, box = shard.tensor, shard.box
        name = tensor.name
        if place and name.endswith(f".{place}"):
            name = name.removesuffix(place) + PLACE
        alike.setdefault((tensor.shape, tensor.dtype, tensor.itemsize, box.offset, box.shape), []).append(name)
    return json.dumps([[*key, sorted(names)] for key, names in sorted(alike.items())], separators=(",", ":")).encode()


@dataclass(frozen=True, slots=True)
class Entry:
    """`owner`: a class, or -1 - the number of a worker whose relative name it is. `alike` of it has the name."""

    owner: int
    number: int
    alike: Alike


class Side:
    """The manifests of all workers in one generation.

    Args:
        class_of: worker -> its class; -1 for a worker that has nothing.
        places: worker -> its place; needed where a class has relative names.
    """

    def __init__(
        self, classes: Sequence[ManifestClass], class_of: Sequence[int] | Workers, places: Sequence[str | None] = ()
    ) -> None:
        self.classes = classes
        self.class_of = np.asarray(class_of, dtype=np.int64)
        order = np.argsort(self.class_of, kind="stable")
        starts = np.searchsorted(self.class_of[order], np.arange(len(classes) + 1))
        self._members = [np.sort(order[low:high]) for low, high in pairwise(starts)]
        self._worker_at = {
            place: worker for worker, place in enumerate(places) if place and self.class_of[worker] >= 0
        }

    @classmethod
    def of(cls, manifests: Sequence[Manifest], places: Sequence[str | None] = ()) -> Side:
        """From every worker's manifest."""
        texts: dict[bytes, int] = {}
        class_of = []
        encoded: dict[tuple[int, str | None], bytes] = {}
        for worker, manifest in enumerate(manifests):
            place = places[worker] if places else None
            if (id(manifest), place) not in encoded:
                encoded[id(manifest), place] = encode_class(manifest, place)
            text = encoded[id(manifest), place]
            class_of.append(texts.setdefault(text, len(texts)) if manifest else -1)
        return cls([ManifestClass.decoded(text) for text in texts], class_of, places)

    def workers(self, owner: int) -> Workers:
        """Of an entry's owner."""
        return self._members[owner] if owner >= 0 else np.array([-1 - owner])

    def find(self, names: Collection[str]) -> dict[str, list[Entry]]:
        """All entries of these tensors."""
        wanted = frozenset(names)
        found: dict[str, list[Entry]] = {}
        for number, each in enumerate(self.classes):
            if not len(self._members[number]):
                continue
            for index, alike in enumerate(each.absolute):
                entry = Entry(number, index, alike)
                for name in alike.names & wanted:
                    found.setdefault(name, []).append(entry)
        for prefix, name in self._relative(wanted):
            worker = self._worker_at.get(name.removeprefix(prefix))
            if worker is not None:
                of = self.classes[self.class_of[worker]].relative.get(prefix)
                if of is not None:
                    found.setdefault(name, []).append(Entry(-1 - worker, 0, of))
        return found

    def _relative(self, names: Iterable[str]) -> list[tuple[str, str]]:
        prefixes = {prefix for each in self.classes for prefix in each.relative}
        return [(prefix, name) for prefix in prefixes for name in names if name.startswith(prefix)]
