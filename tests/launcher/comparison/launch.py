"""Running one command line under one launcher, and what can be seen of it."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.launcher.comparison.cases import OWN_NAMES, OWN_VALUES, Aspect, Case
from tests.launchers import Executed, Forked

HERE = Path(__file__).resolve().parent
TIMEOUT_S = 120.0
_FOLDER = re.compile(r"^[^/]+/(?:attempt_(?P<attempt>\d+)|generation_(?P<generation>\d+)/[^/]+)/")
_DATES = re.compile(r'"timestamp": "?\d+"?|, line \d+')


@dataclass(frozen=True, slots=True)
class Seen:
    """What one run showed, in a form that both launchers would show alike: aspect -> value."""

    aspects: dict[Aspect, Any]
    output: str

    def __getitem__(self, aspect: Aspect) -> Any:
        return self.aspects[aspect]


def run(case: Case, launcher: str, folder: Path) -> Seen:
    """Run `case` under `launcher` in the empty `folder`."""
    reports, logs = folder / "reports", folder / "logs"
    for path in (reports, folder / "tmp"):
        path.mkdir(parents=True)
    _register_logs_specs(folder / "site")
    words = {"PROBE": str(HERE / "probe.py"), "FOLDER": str(reports), "LOGS": str(logs)}
    command = ["--standalone", *(words.get(word, word) for word in (*case.options, *case.program))]
    command += case.action.split()
    inherited = {n: v for n, v in os.environ.items() if not n.startswith(("ETC_", "PET_", "TORCHELASTIC_", "CUDA_"))}
    environment = {
        **inherited,
        "OMP_NUM_THREADS": "1",
        "PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join(map(str, (HERE.parents[2], HERE, folder / "site"))),
        "TMPDIR": str(folder / "tmp"),
        "TORCHELASTIC_ERROR_FILE": str(folder / "error.json"),
        **{name: words.get(value, value) for name, value in case.environment.items()},
    }
    is_told_by_its_start = any(option in case.options for option in ("--start-method", "--logs-specs"))
    start = Executed if is_told_by_its_start else Forked
    process = start(launcher, command, environment, folder, folder / "stdout", folder / "stderr")
    try:
        if case.send is not None:
            _wait_for(reports, process)
            os.kill(process.pid, case.send)
        exit_code = process.wait(TIMEOUT_S)
    finally:
        process.kill()
    assert exit_code is not None, "it did not end"
    stdout, stderr = ((folder / name).read_text() for name in ("stdout", "stderr"))
    found = [json.loads(path.read_text()) for path in sorted(reports.glob("*.json"))]
    prefix = str(folder)
    aspects = {
        Aspect.ENVIRONMENT: [_own(report["environment"], prefix) for report in found],
        Aspect.ARGUMENTS: [[report["arguments"], report["cwd"].replace(prefix, "")] for report in found],
        Aspect.STDOUT: sorted(line for line in stdout.splitlines() if "out " in line),
        Aspect.STDERR: sorted(line for line in stderr.splitlines() if re.search(r"err \d", line)),
        Aspect.LOGS: _files(logs, "*.log"),
        Aspect.ERRORS: {**_files(logs, "error.json"), **_files(folder, "error.json", deep=False)},
        Aspect.EVENTS: _events(stderr),
        Aspect.EXIT: exit_code,
    }
    seen = Seen(aspects, stdout + stderr)
    shutil.rmtree(folder, ignore_errors=True)
    return seen


def _wait_for(reports: Path, process: Executed | Forked) -> None:
    """Until both workers listen: they do so before they report."""
    deadline = time.monotonic() + TIMEOUT_S
    while len(list(reports.glob("*.json"))) < 2 and process.poll() is None:
        assert time.monotonic() < deadline, "the workers did not report"
        time.sleep(0.02)


def _own(environment: dict[str, str], folder: str) -> dict[str, str]:
    """The environment without what is of this run alone."""
    return {
        name: "(its own)" if name in OWN_VALUES else value.replace(folder, "")
        for name, value in environment.items()
        if not name.startswith(OWN_NAMES)
    }


def _files(root: Path, pattern: str, *, deep: bool = True) -> dict[str, Any]:
    """Content by relative path, with our folders named as torchrun's are, and times and line numbers left out."""
    found = {}
    for path in sorted(root.rglob(pattern) if deep else root.glob(pattern)):
        match = _FOLDER.match(name := str(path.relative_to(root)))
        if match:
            attempt = match["attempt"] or str(int(match["generation"]) - 1)
            name = f"attempt_{attempt}/{name[match.end():]}"
        text = path.read_text()
        found[name] = _DATES.sub("", text) if path.suffix == ".json" else sorted(text.splitlines())
    return found


def _events(stderr: str) -> dict[str, int]:
    """How often each event was recorded, by name, source and rank."""
    lines = (line for line in stderr.splitlines() if line.startswith('{"name": "torchelastic'))
    events = [json.loads(line) for line in lines]
    return dict(Counter(f"{e['metadata']['state']} {e['source']} {e['metadata']['global_rank']}" for e in events))


def _register_logs_specs(site: Path) -> None:
    """Make ``--logs-specs aside`` known, as an installed package would."""
    package = site / "aside-1.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: aside\nVersion: 1\n")
    (package / "entry_points.txt").write_text("[torchrun.logs_specs]\naside = aside:Aside\n")
