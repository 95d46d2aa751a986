"""The job report: worked out from made-up records, and looked at in a real browser."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from etc_agent.rendezvous.etcd.client import EtcdClient
from etc_agent.rendezvous.keys import JobKeys
from tests.launcher.ctl.conftest import Ctl, put, put_job

BEGIN = 1_700_000_000.0


def put_life(client: EtcdClient, keys: JobKeys) -> None:
    """An hour of a job: it grows to node b, loses it, goes on, is refused a config, and ends."""
    put_job(client, keys, "a", "b", config="PP1TP1DP2")

    def generation(id_: int, at: float, slots: str, previous: int, trigger: str, reason: str, **costs: Any) -> None:
        shared = {"config": f"PP1TP1DP{len(slots.split())}", "previous": previous, "reason": reason, "trigger": trigger}
        put(client, keys.generation(id_), id=id_, placement=slots.split(), store="s:1", **shared)
        put(client, keys.history(id_), generation=id_, outcome="committed", time=BEGIN + at, **shared, **costs)

    put(client, keys.job, incarnation="x", nnodes="1:4", max_restarts=3, started=BEGIN)
    generation(1, 5, "a/0 a/1", 0, "start", "start", started=2)
    generation(2, 600, "a/0 a/1 b/0 b/1", 1, "request", "asked for 4", kept=2, started=2,
               moved_bytes=6 << 20, stop_ms=80.0, phases_ms={"migrate": 40.0, "vote": 5.0}, step=600)
    put(client, keys.history(3), generation=3, config="PP1TP2DP2", previous=2, reason="asked for TP2DP2",
        outcome="withdrawn", trigger="request", why="<b>this model</b> is data parallel", time=BEGIN + 1200)
    generation(4, 1800, "a/0 a/1", 2, "node_lost", "node b was lost", kept=2, moved_bytes=1 << 20,
               stop_ms=900.0, phases_ms={"migrate": 10.0}, step=1700)
    generation(5, 2400, "a/0 a/1", 0, "worker_raised", "restart 1 of 3: the worker on a/1 failed: boom",
               started=2)
    put(client, keys.current, committed=5, outcome="succeeded", why="every worker has finished", restarts=1)
    put(client, keys.status, generation=5, step=3000, num_steps=3000, time=BEGIN + 3600,
        goodput={"since": BEGIN, "trained_s": 3240.0, "step": 3000})


@pytest.fixture
def page(ctl: Ctl, client: EtcdClient, keys: JobKeys, tmp_path: Path) -> str:
    put_life(client, keys)
    path = tmp_path / "report.html"
    assert ctl("report", "-o", str(path)).out == f"{path}: 4 generations, 2 failures\n"
    return path.read_text()


def test_the_sums_are_those_of_the_history(ctl: Ctl, client: EtcdClient, keys: JobKeys, tmp_path: Path) -> None:
    put_life(client, keys)
    facts = ctl("report", "-o", str(tmp_path / "report.html"), "--output", "json").json
    assert facts["generations"] == 4
    assert facts["failures"] == 2
    assert facts["goodput"] == 0.9
    assert facts["moved_bytes"] == 7 << 20
    assert facts["stopped_s"] == pytest.approx(0.98)


def test_the_page_stands_alone_and_escapes_what_jobs_say(page: str) -> None:
    assert not re.search(r"""<script|<link|@import|url\(|(?:src|href)\s*=""", page)
    assert "&lt;b&gt;this model&lt;/b&gt; is data parallel" in page
    assert "<b>this model" not in page


def test_what_is_gone_from_the_history_is_in_the_sums(
    ctl: Ctl, client: EtcdClient, keys: JobKeys, tmp_path: Path
) -> None:
    put_life(client, keys)
    account = {"changes": [["committed", "request", 7]], "restarts": {}, "moved_bytes": 1 << 20,
               "stops": [[0, 0, 0, 0, 7, *[0] * 11], 0.5], "phases": {}}
    put(client, keys.account, **account)
    path = tmp_path / "report.html"
    facts = ctl("report", "-o", str(path), "--output", "json").json
    assert facts["moved_bytes"] == 8 << 20
    assert "The records of 7 older generations are gone" in path.read_text()


def test_events_of_several_nodes_are_told_once(ctl: Ctl, client: EtcdClient, keys: JobKeys, tmp_path: Path) -> None:
    put_life(client, keys)
    files = []
    for node, delay in (("a", 0.2), ("b", 0.1)):
        files.append(tmp_path / f"events-{node}.jsonl")
        ours = {"run_id": "demo", "node": node}
        events = [
            {**ours, "time": BEGIN + 590 + delay, "event": "node_joined", "name": "b", "slots": 2},
            {**ours, "time": BEGIN + 700, "run_id": "another", "event": "node_gone", "name": "z"},
            {**ours, "time": BEGIN + 3600, "event": "agent_ended", "exit_code": 0, "why": node},
        ]
        files[-1].write_text("".join(json.dumps(event) + "\n" for event in events))
    path = tmp_path / "report.html"
    given = [word for file in files for word in ("--events", str(file))]
    assert ctl("report", "-o", str(path), *given).code == 0
    row = r'<td class="t">(node joined|node gone|agent ended)</td><td>(.*?)</td><td class="t">(\w)</td>'
    assert re.findall(row, path.read_text()) == [
        ("node joined", "name b, slots 2", "b"), ("agent ended", "exit_code 0, why a", "a"),
        ("agent ended", "exit_code 0, why b", "b"),
    ]
    files[0].write_text("{}\n")
    ended = ctl("report", "-o", str(path), *given)
    assert (ended.code, "line 1: not an event of etc-run" in ended.err) == (2, True)


def test_a_job_that_has_not_started_has_a_page_too(ctl: Ctl, client: EtcdClient, keys: JobKeys, tmp_path: Path) -> None:
    client.delete_prefix(keys.root)
    put(client, keys.job, incarnation="x", nnodes="1:4", started=BEGIN)
    path = tmp_path / "report.html"
    assert ctl("report", "-o", str(path)).code == 0
    assert "No generation has been started." in path.read_text()
    assert ctl("report", "-o", str(tmp_path / "no" / "such.html")).code == 2


def test_a_month_with_a_thousand_changes_on_many_nodes_is_a_page_of_bounded_pictures(
    ctl: Ctl, client: EtcdClient, keys: JobKeys, tmp_path: Path
) -> None:
    put_job(client, keys)
    for id_ in range(1, 400):
        slots = [f"n{index}/0" for index in range(100 + id_ % 2)]
        shared = {"config": f"DP{len(slots)}", "previous": id_ - 1, "reason": "x"}
        put(client, keys.generation(id_), id=id_, placement=slots, store="s", **shared)
        put(client, keys.history(id_), generation=id_, outcome="committed", time=BEGIN + 6000 * id_, stop_ms=100.0,
            **shared)
    path = tmp_path / "report.html"
    assert ctl("report", "-o", str(path)).code == 0
    page = path.read_text()
    assert page.index(">n100<") < page.index(">n0<"), "nodes that come and go stand first"
    assert "41 more nodes are left out" in page


@pytest.fixture
def browser() -> Iterator[Any]:
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        pytest.skip("no Chromium on this machine: apt-get install chromium")
    api = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    with api.sync_playwright() as play:
        launched = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_whole_in_a_browser(page: str, browser: Any, tmp_path: Path, scheme: str) -> None:
    tab = browser.new_page(viewport={"width": 1100, "height": 900}, color_scheme=scheme)
    asked, complaints = [], []
    tab.on("request", lambda request: asked.append(request.url))
    tab.on("console", lambda message: complaints.append(message.text))
    tab.on("pageerror", lambda error: complaints.append(str(error)))
    tab.goto((tmp_path / "report.html").as_uri())
    assert asked == [(tmp_path / "report.html").as_uri()], "it stands alone"
    assert complaints == []
    assert tab.title() == "demo: job report"
    tiles = tab.locator("#tiles .tile").all_inner_texts()
    assert tiles[0].split("\n")[0] == "90.0 %"
    assert [tile.split("\n")[0] for tile in tiles[1:6]] == ["3000 / 3000", "2", "1", "2", "7.0 MiB"]
    blocks = [block.bounding_box() for block in tab.locator("#timeline > g > rect").all()]
    assert len(blocks) == 4
    assert all(box["width"] > 0 and box["height"] > 0 for box in blocks)
    assert blocks[1]["height"] == pytest.approx(2 * blocks[0]["height"], rel=0.02), "four workers are twice two"
    assert blocks[1]["x"] == pytest.approx(blocks[0]["x"] + blocks[0]["width"], abs=2.0)
    assert tab.locator("#timeline rect.failure").count() == 2
    assert tab.locator("#nodes rect.node").count() == 2
    assert tab.locator("#failures tr").count() == 4
    assert "handled in place" in tab.locator("#failures").inner_text()
    assert tab.locator("#generations tr").count() == 5
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing sticks out"
    look = "getComputedStyle(document.body)"
    colour, paper = tab.evaluate(f"[{look}.color, {look}.backgroundColor]")
    assert colour != paper
    tab.screenshot(path=str(tmp_path / f"{scheme}.png"), full_page=True)
    assert (tmp_path / f"{scheme}.png").stat().st_size > 10_000
