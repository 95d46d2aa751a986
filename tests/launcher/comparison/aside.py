"""A user's own LogsSpecs: all files in one folder, named by rank."""

from __future__ import annotations

import os

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs


class Aside(LogsSpecs):
    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        folder = os.path.join(str(self._root_log_dir), "aside", "attempt_0")
        os.makedirs(folder, exist_ok=True)
        by_name = {
            name: {index: os.path.join(folder, f"{env['RANK']}.{name}.log") for index, env in envs.items()}
            for name in ("out", "err", "error")
        }
        for index, env in envs.items():
            env["TORCHELASTIC_ERROR_FILE"] = by_name["error"][index]
            env["LOGS_OF"] = f"slot {index} of {len(envs)}"
        return LogsDest(by_name["out"], by_name["err"], {}, {}, by_name["error"])

    @property
    def root_log_dir(self) -> str:
        return str(self._root_log_dir)
