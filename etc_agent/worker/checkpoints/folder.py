"""The folder of a job's checkpoints: which are complete, which may be deleted, and how far training had come.

    <folder>/step-120/            a complete checkpoint: DCP's files, and the marker
    <folder>/.step-140.gen3/      one that is being written, or was when everything died
    <folder>/progress.json        the next step of training and the time, a few times a second

A checkpoint is complete when its folder has its final name and a marker that fits: the marker is written and flushed
after every rank has flushed its file, and the folder is renamed after that. The marker holds the size of every file and
the hash of DCP's metadata, so that what a file system has lost since then is noticed too.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from etc_agent.control.checkpoint_settings import NAME
from etc_agent.errors import EtcError

MARKER: Final = "etc-run.json"
METADATA: Final = ".metadata"
_PROGRESS: Final = "progress.json"
_UNFINISHED: Final = re.compile(r"\.step-\d+\.\w+")


@dataclass(frozen=True, slots=True)
class Marker:
    """What the marker of a complete checkpoint says. `step`: the next step to run; `time`: when the state was copied,
    in seconds since 1970; `stopped_s`: for how long rank 0 stood still for that; `written_s`: how long the writing
    took, beside training. `files`: name -> size in bytes; `metadata`: SHA-256 of DCP's metadata file."""

    step: int
    time: float
    config: str
    stopped_s: float
    written_s: float
    files: dict[str, int]
    metadata: str


@dataclass(frozen=True, slots=True)
class Progress:
    """How far training had come: the next `step`, at `time` in seconds since 1970."""

    step: int
    time: float


def path_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step}"


def unfinished_path(folder: Path, step: int, life: str) -> Path:
    """Where the checkpoint is written. `life`: distinguishes the writers of one step in different generations."""
    return folder / f".step-{step}.{life}"


def begin(folder: Path, step: int, life: str) -> Path:
    """Make the folder in which a checkpoint is written, and remove what earlier attempts have left there.

    Raises:
        OSError: it cannot be made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for entry in folder.iterdir():
        discard(entry)
    path = unfinished_path(folder, step, life)
    path.mkdir()
    return path


def discard(unfinished: Path) -> None:
    """Remove what `begin` has made, and nothing else."""
    if _UNFINISHED.fullmatch(unfinished.name):
        shutil.rmtree(unfinished, ignore_errors=True)


def finish(written: Path, step: int, marker: dict[str, Any]) -> Path:
    """Make a checkpoint complete of which every rank has written and flushed its files; returns its path. `marker`: the
    values of `Marker` apart from those that are found here.

    Raises:
        OSError: the disk is full, say; the checkpoint stays incomplete.
        EtcError: a folder of that name is there which is no checkpoint of etc-run.
    """
    path = path_of(written.parent, step)
    if path.exists() and not _is_ours(path):
        raise EtcError(f"{path} is there and is no checkpoint of etc-run; give a folder of its own to this job")
    files = {entry.name: entry.stat().st_size for entry in written.iterdir()}
    complete = Marker(**marker, step=step, files=files, metadata=_hash(written / METADATA))
    _write(written / MARKER, _sealed(asdict(complete)))
    _flush(written)
    replaced = written.with_name(f"{written.name}_replaced")
    if path.exists():  # it was broken, or of a training that was given up for an earlier step
        path.rename(replaced)
    written.rename(path)
    _flush(path.parent)
    discard(replaced)
    return path


def check(path: Path) -> Marker:
    """The marker of a complete checkpoint.

    Raises:
        EtcError: it is not complete; the message says what is missing or different.
    """
    try:
        value = json.loads((path / MARKER).read_bytes())
        marker = Marker(**value["checkpoint"])
        is_sealed = _sealed(value["checkpoint"]) == _sealed_text(value)
    except FileNotFoundError:
        raise EtcError(f"{path.name} has no {MARKER}: it was not written to its end") from None
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise EtcError(f"{path.name}/{MARKER} cannot be read: {error}") from None
    if not is_sealed:
        raise EtcError(f"{path.name}/{MARKER} has been changed since it was written")
    for name, size in marker.files.items():
        try:
            found = (path / name).stat().st_size
        except OSError:
            raise EtcError(f"{path.name}/{name} is missing") from None
        if found != size:
            raise EtcError(f"{path.name}/{name} has {found:,} bytes and was written with {size:,}")
    if _hash(path / METADATA) != marker.metadata:
        raise EtcError(f"{path.name}/{METADATA} has been changed since it was written")
    return marker


def is_complete(path: Path) -> bool:
    try:
        check(path)
    except (EtcError, OSError):
        return False
    return True


def newest_first(folder: Path) -> list[Path]:
    """Every checkpoint that has its final name, complete or not."""
    try:
        found = [entry for entry in folder.iterdir() if NAME.fullmatch(entry.name) and entry.is_dir()]
    except OSError:
        return []
    return sorted(found, key=_step_of, reverse=True)


def prune(folder: Path, keep: int) -> list[Path]:
    """Delete all but the `keep` (>= 1) newest complete checkpoints, and broken ones that are older than these. Folders
    without a marker are not ours, and stay. Returns what was deleted."""
    kept, deleted = 0, []
    for path in newest_first(folder):
        if kept >= keep and _is_ours(path):
            # Under this name it is removed by the next one, in case this is not done to its end.
            unfinished = unfinished_path(folder, _step_of(path), "deleted")
            path.rename(unfinished)
            discard(unfinished)
            deleted.append(path)
        elif is_complete(path):
            kept += 1
    return deleted


def write_progress(folder: Path, progress: Progress) -> None:
    """Note how far training has come. Not flushed: it serves a message only.

    Raises:
        OSError: it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f".{_PROGRESS}.part"
    part.write_text(json.dumps(asdict(progress)))
    part.replace(folder / _PROGRESS)


def read_progress(folder: Path) -> Progress | None:
    try:
        value = json.loads((folder / _PROGRESS).read_bytes())
        return Progress(int(value["step"]), float(value["time"]))
    except (OSError, ValueError, TypeError, LookupError):
        return None


def lost_since(marker: Marker, progress: Progress | None) -> str:
    """What of the training is lost if it goes on from a checkpoint, in words."""
    if progress is None:
        return "how much training was lost is not known"
    steps = max(0, progress.step - marker.step)
    if not steps:
        return "no step lost"
    seconds = max(0.0, progress.time - marker.time)
    return f"{steps} {'step' if steps == 1 else 'steps'} and {seconds:.1f} s of training lost"


def _is_ours(path: Path) -> bool:
    return (path / MARKER).exists()


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _sealed(checkpoint: dict[str, Any]) -> str:
    body = json.dumps(checkpoint, sort_keys=True)
    return json.dumps({"checkpoint": checkpoint, "sha256": hashlib.sha256(body.encode()).hexdigest()}, sort_keys=True)


def _sealed_text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _hash(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _flush(folder: Path) -> None:
    """Have the names in `folder` survive a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
