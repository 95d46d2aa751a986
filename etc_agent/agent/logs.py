"""Where a worker's output goes: torchrun's redirects and tees, one folder per generation, node and rank.

torchrun's own LogsSpecs numbers the workers of one context from 0 and deletes the folder of an attempt that comes
again. We start one context per worker and keep everything.
"""

from __future__ import annotations

import os
from pathlib import Path

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, Std


class WorkerLogs(LogsSpecs):
    """The LogsSpecs of one worker, cut out of those of its node.

    `node_specs`: what torchrun built from the command line; its redirects and tee are by local rank. `folder`: where
    this worker's files lie, or None where torchrun would write none.
    """

    def __init__(self, node_specs: LogsSpecs, local_rank: int, folder: Path | None) -> None:
        super().__init__()
        self._redirect = _of_rank(node_specs._redirects, local_rank) | _of_rank(node_specs._tee, local_rank)
        self._tee_stream = _of_rank(node_specs._tee, local_rank)
        chosen = node_specs._local_ranks_filter
        self._is_silent = chosen is not None and len(chosen) > 0 and local_rank not in chosen
        self._folder = folder

    @property
    def root_log_dir(self) -> str:
        return str(self._folder) if self._folder else os.devnull

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Destinations for the one worker in `envs`, whose key is 0."""
        if self._folder is None:
            envs[0]["TORCHELASTIC_ERROR_FILE"] = ""
            console = {0: os.devnull if self._is_silent else ""}
            return LogsDest(dict(console), dict(console), {}, {}, {0: os.devnull}, os.devnull, os.devnull)
        self._folder.mkdir(parents=True, exist_ok=True)
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
