"""etc-ctl scale --dry-run: asks the leader, shows its plan, and leaves nothing behind."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable

import pytest

from etc_agent.reconfig.known.records import History
from etc_agent.reconfig.sizes.preview import NodePreview, PlanPreview, Preview
from etc_agent.rendezvous.etcd.client import EtcdClient
from etc_agent.rendezvous.keys import JobKeys
from etc_agent.rendezvous.mirror import Mirror
from launcher.ctl.dry_run import predicted
from tests.launcher.ctl.conftest import Ctl, put

PLAN = PlanPreview(
    "PP1TP1DP4", "PP2TP1DP1", 1000, 3 << 20, 1 << 20, 12, 5 << 20, 4 << 20, 1 << 20,
    (NodePreview("a", (0, 1), (0, 1, 2, 3), 1000, 3 << 20, 1 << 20, 5 << 20),),
)


@pytest.fixture
def leader(client: EtcdClient, keys: JobKeys) -> Callable[[Preview], threading.Thread]:
    """Answers the next preview."""

    def answer(said: Preview) -> threading.Thread:
        mirror = Mirror(client, keys.root)

        def run() -> None:
            if mirror.wait_for(lambda now: keys.preview in now, 20):
                asked = mirror.snapshot()[keys.preview]
                fields = {**said.to_json(), "request": asked.text, "revision": asked.mod_revision}
                client.put(keys.preview_reply, json.dumps(fields))
            mirror.close()

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    return answer


def test_the_plan_is_shown_and_nothing_is_asked_for(
    ctl: Ctl, client: EtcdClient, keys: JobKeys, leader: Callable[[Preview], threading.Thread]
) -> None:
    put(client, keys.history(1), generation=1, config="PP2TP1DP1", previous=9, reason="x", outcome="committed",
        moved_bytes=3 << 20, stop_ms=100.0, phases_ms={"migrate": 40.0})
    thread = leader(Preview("", 0, "accepted", "changing to PP1TP1DP4", "PP1TP1DP4", plan=PLAN))
    shown = ctl("scale", "4", "--dry-run")
    thread.join(20)
    assert shown.code == 0
    for said in ("4: would be accepted: changing to", "3.0 MiB move in 12 transfers", "100 ms, from 1 change"):
        assert said in shown.out
    assert client.get(keys.scale) is None
    assert client.get(keys.preview) is None
    thread = leader(Preview("", 0, "refused", "4 heads cannot be divided over tp=3"))
    refused = ctl("scale", "TP3", "--dry-run", "-o", "json")
    thread.join(20)
    assert (refused.code, refused.json["result"], refused.json["predicted_stop"]) == (1, "refused", None)


def test_without_an_answer_the_question_is_taken_back(ctl: Ctl, client: EtcdClient, keys: JobKeys) -> None:
    ended = ctl("scale", "4", "--dry-run", "--timeout", "0.2")
    assert (ended.code, len(ended.err.splitlines())) == (5, 1)
    assert client.get(keys.preview) is None


def test_the_stop_time_is_predicted_from_the_changes_before() -> None:
    def change(id_: int, stop_ms: float | None, migrate_ms: float, moved: int, outcome: str = "committed") -> History:
        phases_ms = {"migrate": migrate_ms}
        return History(id_, "DP2", 1, "x", outcome, moved_bytes=moved, stop_ms=stop_ms, phases_ms=phases_ms)

    assert predicted([History(1, "DP2", 0, "start", "committed")], 100) is None
    assert predicted([change(2, None, 5.0, 10), change(3, 50.0, 5.0, 10, "withdrawn")], 100) is None
    known = [change(2, 60.0, 10.0, 1000), change(3, 80.0, 30.0, 3000)]
    first = predicted(known, 2000)
    assert first is not None
    assert (first.stop_s, first.num_changes) == (0.07, 2)
    without_bytes = predicted([change(2, 50.0, 0.0, 0)], 2000)
    assert without_bytes is not None
    assert without_bytes.stop_s == 0.05
