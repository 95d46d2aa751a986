"""Where a worker's output goes: torchrun's redirects and tees, one folder per generation, node and rank.

torchrun's own LogsSpecs number the workers of one context from 0, and delete the folder of an attempt that occurs
again. Here each worker has a context of its own, and nothing is deleted.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, LogsSpecs, PContext, Std

from etc_agent.parallel.generation import Generation
from etc_agent.parallel.topology import Slot
from etc_agent.torch_private.logs_specs import streams_of

logger = logging.getLogger(__name__)

_LEAST_ROOM_BYTES = 1 << 16


class NodeLogs:
    """The log destinations of one node's workers, by generation.

    `specs`: what torchrun built from the command line. `folder`: for this run's logs, or None where torchrun would
    write none. A user's own ``--logs-specs`` decide themselves, once per generation for all slots of the node, as under
    torchrun.
    """

    def __init__(self, specs: LogsSpecs, folder: Path | None, num_slots: int) -> None:
        self._specs, self._folder, self._num_slots = specs, folder, num_slots
        self._given: tuple[int, LogsDest, dict[int, dict[str, str]]] = (0, LogsDest(), {})

    @property
    def published(self) -> str:
        """The folder in which a worker's files are found by generation, node and rank. "" where there is none, and
        where the user's own LogsSpecs decide."""
        return str(self._folder.absolute()) if self._folder is not None and self.admit_spares else ""

    @property
    def admit_spares(self) -> bool:
        """Whether a process can log before it has a rank: not where the user's own LogsSpecs decide."""
        return type(self._specs) is DefaultLogsSpecs

    @property
    def are_alike(self) -> bool:
        """Whether all workers of this node log in the same way, whatever their local ranks."""
        streams = streams_of(self._specs)
        return not (streams.local_ranks or isinstance(streams.tee, dict) or isinstance(streams.redirects, dict))

    def of_spare(self, slot: Slot) -> tuple[LogsSpecs, Path | None]:
        """The LogsSpecs of a new warm spare in `slot`, and the folder of its files, if any."""
        if self._folder is None:
            return WorkerLogs(self._specs, slot.index, None), None
        path = self._folder / "spares" / slot.node / f"{slot.index}-{secrets.token_hex(4)}"
        if not self._make(path):
            return WorkerLogs(self._specs, slot.index, None), None
        return WorkerLogs(self._specs, slot.index, path), path

    def adopt(self, folder: Path | None, slot: Slot, generation: Generation) -> None:
        """The warm spare that logs to `folder` becomes the worker in `slot` of `generation`: link its files there."""
        if self._folder is not None and folder is not None:
            place = self._place(self._folder, slot, generation)
            try:
                place.parent.mkdir(parents=True, exist_ok=True)
                if place.is_dir():  # from an earlier job of this name
                    shutil.rmtree(place)
                place.symlink_to(os.path.relpath(folder, place.parent))
            except OSError as error:
                logger.warning("the logs of %s stay in %s; no link from %s: %s", slot, folder, place, error.strerror)

    def _make(self, path: Path) -> bool:
        """Create the folder `path`; returns whether files can be created in it. Without logs training continues.

        Only this user can enter the run's folder, unless it existed before.
        """
        assert self._folder is not None
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path):
                return True
        except OSError as error:
            why = "no logs can be written to %s: %s; a worker writes to the console instead"
            logger.error(why, path, error.strerror)
            return False

    def _place(self, folder: Path, slot: Slot, generation: Generation) -> Path:
        """The place of the logs of the worker in `slot` of `generation`. An existing link is from an earlier job of
        this name and is removed."""
        place = folder / f"generation_{generation.id}" / slot.node / str(generation.placement.index(slot))
        if place.is_symlink():
            place.unlink()
        return place

    def of(self, slot: Slot, generation: Generation, environment: Mapping[str, str]) -> LogsSpecs:
        """The LogsSpecs of the one worker that is started in `slot` for `generation`."""
        if type(self._specs) is DefaultLogsSpecs:
            path = self._folder and self._place(self._folder, slot, generation)
            return WorkerLogs(self._specs, slot.index, path if path is not None and self._make(path) else None)
        if self._given[0] != generation.id:
            ranks = {other.index: rank for rank, other in enumerate(generation.placement) if other.node == slot.node}
            # torchrun empties an attempt's folder when the attempt occurs again, and generations may share an attempt.
            attempt = {"TORCHELASTIC_RESTART_COUNT": str(generation.id - 1)}
            envs = {
                index: {**environment, "LOCAL_RANK": str(index), "RANK": str(ranks.get(index, -1)), **attempt}
                for index in range(self._num_slots)
            }
            before = {index: dict(env) for index, env in envs.items()}
            destinations = self._specs.reify(envs)
            added = {index: dict(env.items() - before[index].items()) for index, env in envs.items()}
            self._given = (generation.id, destinations, added)
        return _Chosen(self._specs, self._given[1], slot.index, self._given[2][slot.index])


def remove_empty_logs(specs: LogsSpecs, run_id: str = "") -> None:
    """Remove the folders in which nothing was logged: those of run `run_id`, and torchrun's temporary one, which it
    creates in any case."""
    root = Path(specs.root_log_dir)
    is_temporary = root.name.startswith("torchelastic_") and root.parent == Path(tempfile.gettempdir())
    for folder in ([root / run_id] if run_id else []) + ([root] if is_temporary else []):
        if folder.is_dir() and not any(path.is_file() for path in folder.rglob("*")):
            shutil.rmtree(folder, ignore_errors=True)


def full_folder(context: PContext) -> str | None:
    """The folder of a worker's output, if its file system is full."""
    for file in (context.stdouts[0], context.stderrs[0]):
        folder = os.path.dirname(file)
        if folder and file != os.devnull:
            try:
                system = os.statvfs(folder)
            except OSError:
                continue
            if system.f_bavail * system.f_frsize < _LEAST_ROOM_BYTES:
                return folder
    return None


class _Chosen(LogsSpecs):
    """One worker's part of what the user's own LogsSpecs decided for its node."""

    def __init__(self, specs: LogsSpecs, node: LogsDest, index: int, added: Mapping[str, str]) -> None:
        super().__init__()
        self._specs, self._node, self._index, self._added = specs, node, index, added

    @property
    def root_log_dir(self) -> str:
        return self._specs.root_log_dir

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        envs[0].update(self._added)

        def own(paths: dict[int, str]) -> dict[int, str]:
            return {0: paths[self._index]} if self._index in paths else {}

        node = self._node
        return LogsDest(
            own(node.stdouts), own(node.stderrs), own(node.tee_stdouts), own(node.tee_stderrs), own(node.error_files),
            node.filtered_stdout, node.filtered_stderr,
        )


class WorkerLogs(LogsSpecs):
    """The LogsSpecs of one worker, derived from those of its node.

    `node_specs`: what torchrun built from the command line, with redirects and tees by local rank. `folder`: for this
    worker's files, or None where torchrun would write none.
    """

    def __init__(self, node_specs: LogsSpecs, local_rank: int, folder: Path | None) -> None:
        super().__init__()
        streams = streams_of(node_specs)
        self._tee_stream = _of_rank(streams.tee, local_rank)
        self._redirect = _of_rank(streams.redirects, local_rank) | self._tee_stream
        chosen = streams.local_ranks
        self._is_silent = chosen is not None and len(chosen) > 0 and local_rank not in chosen
        self._folder = folder

    @property
    def root_log_dir(self) -> str:
        return str(self._folder) if self._folder else os.devnull

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """The destinations for the one worker in `envs`, whose key is 0."""
        if self._folder is None:
            envs[0]["TORCHELASTIC_ERROR_FILE"] = ""
            console = {0: os.devnull if self._is_silent else ""}
            return LogsDest(dict(console), dict(console), {}, {}, {0: os.devnull}, os.devnull, os.devnull)
        destinations: dict[Std, str] = {}
        tees: dict[Std, dict[int, str]] = {}
        for stream, name in ((Std.OUT, "stdout.log"), (Std.ERR, "stderr.log")):
            redirected = stream in self._redirect
            destinations[stream] = str(self._folder / name) if redirected else os.devnull if self._is_silent else ""
            tees[stream] = {0: destinations[stream]} if stream in self._tee_stream and not self._is_silent else {}
        error_file = str(self._folder / "error.json")
        envs[0]["TORCHELASTIC_ERROR_FILE"] = error_file
        return LogsDest(
            {0: destinations[Std.OUT]},
            {0: destinations[Std.ERR]},
            tees[Std.OUT],
            tees[Std.ERR],
            {0: error_file},
            str(self._folder / "filtered_stdout.log"),
            str(self._folder / "filtered_stderr.log"),
        )


def _of_rank(streams: Std | dict[int, Std], local_rank: int) -> Std:
    return streams.get(local_rank, Std.NONE) if isinstance(streams, dict) else streams
