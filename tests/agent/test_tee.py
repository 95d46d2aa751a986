"""What is shown of a log that grows."""

from __future__ import annotations

import io
import subprocess
import sys
import threading
import tracemalloc
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing import LogsDest

from etc_agent.agent.processes import tee
from etc_agent.agent.processes.tee import LONGEST_LINE_BYTES, Tee, lines


def ended() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


def shown(content: bytes) -> list[str]:
    return list(lines(io.BytesIO(content), ended(), lambda: None))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"a\nb\n", ["a\n", "b\n"]), (b"a\r\nb", ["a\n", "b\n"]), (b"10%\r20%\r", ["10%\n", "20%\n"]), (b"", []),
        (b"\n\n", ["\n", "\n"]), ("ü\n".encode(), ["ü\n"]), (b"\xff\n", ["�\n"]),
        (b"x" * 65535 + "ü\n".encode(), ["x" * 65535 + "ü\n"]),
    ],
)
def test_every_line_is_shown_once_with_its_end(content: bytes, expected: list[str]) -> None:
    assert shown(content) == expected


def test_a_line_that_is_too_long_is_shown_in_pieces_and_nothing_is_lost() -> None:
    text = "x" * (3 * LONGEST_LINE_BYTES + 5)
    pieces = shown(f"{text}\nshort\n".encode())
    assert "".join(piece.removesuffix("\n") for piece in pieces) == f"{text}short"
    assert pieces[-1] == "short\n"
    assert all(len(piece) <= LONGEST_LINE_BYTES + (1 << 16) for piece in pieces)


def test_a_line_without_end_takes_little_memory(tmp_path: Path) -> None:
    file = tmp_path / "log"
    with file.open("wb") as log:
        log.truncate(200 << 20)
    with file.open("rb") as log:
        tracemalloc.start()
        assert sum(len(line) - 1 for line in lines(log, ended(), lambda: None)) == 200 << 20
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak_bytes < 16 << 20


def test_a_line_is_shown_when_it_is_whole(tmp_path: Path) -> None:
    file, event, asked = tmp_path / "log", threading.Event(), threading.Semaphore(0)
    found: list[str] = []
    with file.open("ab", buffering=0) as log, file.open("rb") as reader:
        thread = threading.Thread(target=lambda: found.extend(lines(reader, event, asked.release)))
        log.write(b"first\nsec")
        thread.start()
        asked.acquire(timeout=10)
        log.write(b"ond\nthird")
        event.set()
        thread.join(10)
    assert found == ["first\n", "second\n", "third\n"]


def test_lines_with_a_word_are_copied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, filtered = tmp_path / "stdout.log", tmp_path / "filtered.log"
    log.write_text("apple\npear\n")
    destinations = LogsDest(tee_stdouts={0: str(log)}, filtered_stdout=str(filtered), filtered_stderr=str(filtered))
    Tee(destinations, "[0]:", (["app"], None)).close()
    assert capsys.readouterr().out == "[0]:apple\n[0]:pear\n"
    assert filtered.read_text() == "[0]:apple\n"


def test_a_stream_that_never_came_does_not_hold_the_end_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tee, "_LAST_LINES_S", 10.0)
    follower = Tee(LogsDest(tee_stderrs={0: str(tmp_path / "none.log")}), "", (None, None))
    follower.close()
    assert not any(thread.is_alive() for thread in follower._threads)


def test_a_worker_that_nobody_waited_for_does_not_hold_up_the_end_of_the_agent(tmp_path: Path) -> None:
    (tmp_path / "stdout.log").write_text("the last words\n")
    script = (
        "import sys; from torch.distributed.elastic.multiprocessing import LogsDest; "
        "from etc_agent.agent.processes.tee import Tee; "
        f"Tee(LogsDest(tee_stdouts={{0: {str(tmp_path / 'stdout.log')!r}}}), '', (None, None)); sys.exit(3)"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (3, "the last words\n")
