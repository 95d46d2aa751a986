"""Shows what workers write to their log files on the console as well: torchrun's ``--tee``.

torch's own `TailLog` reads a whole line into memory, however long, and takes an unfinished line for a complete one.
"""

from __future__ import annotations

import codecs
import io
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, TextIO

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

LONGEST_LINE_BYTES = 1 << 20
"""Longer lines are shown in pieces of this size, each as a line. The log file has them unchanged."""
_CHUNK_BYTES = 1 << 16
_LOOK_EVERY_S = 0.1
_LAST_LINES_S = 0.05
"""The agent has more urgent things to do when a worker has ended than to wait for a slow console."""

Sink = Callable[[str], None]


class Tee:
    """The streams of one worker that are shown, each followed by a thread.

    `destinations`: of a single worker, whose key is 0. `prefix`: printed before each line; may be changed. `filters`:
    for standard output and standard error, the words of which a line must contain one to be copied to the file of
    filtered lines.
    """

    def __init__(
        self, destinations: LogsDest, prefix: str, filters: tuple[Sequence[str] | None, Sequence[str] | None]
    ) -> None:
        self.prefix = prefix
        self._has_ended = threading.Event()
        self._threads = []
        streams = (
            (destinations.tee_stdouts, sys.stdout, destinations.filtered_stdout, filters[0]),
            (destinations.tee_stderrs, sys.stderr, destinations.filtered_stderr, filters[1]),
        )
        for files, console, filtered, words in streams:
            if 0 in files:
                arguments = (Path(files[0]), console, Path(filtered), tuple(words or ()))
                thread = threading.Thread(target=self._follow, args=arguments, name="tee")
                thread.start()
                self._threads.append(thread)

    def close(self) -> None:
        """The worker has ended: show the rest. What takes long is shown later, at the latest before the program
        exits."""
        self._has_ended.set()
        for thread in self._threads:
            thread.join(_LAST_LINES_S)

    def _follow(self, file: Path, console: TextIO, filtered: Path, words: tuple[str, ...]) -> None:
        while not file.exists():  # a worker that runs a function creates the file itself
            if self._has_ended.wait(_LOOK_EVERY_S):
                return
        copy: TextIO | None = filtered.open("w", errors="replace", buffering=1) if words else None
        try:
            with file.open("rb") as log:
                for line in lines(log, self._has_ended, console.flush):
                    console.write(self.prefix + line)
                    if copy is not None and any(word in line for word in words):
                        copy.write(self.prefix + line)
        except OSError as error:
            print(f"etc-run: {file} is not shown any more: {error.strerror}", file=sys.stderr)
        finally:
            if copy is not None:
                copy.close()


def lines(log: BinaryIO, has_ended: threading.Event, at_end: Callable[[], None]) -> Iterator[str]:
    """Every line of a growing file, each with its newline, until everything has been read after `has_ended`, or after
    the end of the program's main thread, which must not be delayed. `at_end` is called whenever there is nothing more
    to read for now."""
    # A carriage return ends a line, too: progress bars write no newlines.
    decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8")("replace"), translate=True)
    pending: list[str] = []
    length = 0
    while True:
        is_last = has_ended.is_set() or not threading.main_thread().is_alive()
        chunk = log.read(_CHUNK_BYTES)
        if not chunk:
            if is_last:
                break
            at_end()
            has_ended.wait(_LOOK_EVERY_S)
            continue
        *whole, rest = decoder.decode(chunk).split("\n")
        for line in whole:
            yield "".join([*pending, line, "\n"])
            pending, length = [], 0
        if rest:
            pending.append(rest)
            length += len(rest)
        if length >= LONGEST_LINE_BYTES:
            yield "".join([*pending, "\n"])
            pending, length = [], 0
    if pending:
        yield "".join([*pending, "\n"])
    at_end()


class WithoutTee(LogsSpecs):
    """The destinations of `specs` with torch doing only the redirects, not the tees. `destinations`: all of them, once
    torch has asked."""

    def __init__(self, specs: LogsSpecs) -> None:
        super().__init__()
        self._specs = specs
        self.destinations: LogsDest | None = None

    @property
    def root_log_dir(self) -> str:
        return self._specs.root_log_dir

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        self.destinations = self._specs.reify(envs)
        return replace(self.destinations, tee_stdouts={}, tee_stderrs={})
