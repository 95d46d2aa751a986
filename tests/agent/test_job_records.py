"""The job's keys as typed records, and what a person has written wrongly among them."""

from __future__ import annotations

import logging

import pytest

from etc_agent.agent.job_records import RecordReader
from etc_agent.reconfig.known.observing import JobRecords
from etc_agent.reconfig.sizes.controls import Cordon, Order
from etc_agent.rendezvous.etcd.values import KeyValue
from etc_agent.rendezvous.keys import JobKeys

KEYS = JobKeys("job")


def read(**written: str) -> JobRecords:
    """`written`: what follows ``control/``, with __ for a slash, and its value."""
    keys = {KEYS.control_prefix + name.replace("__", "/"): value for name, value in written.items()}
    return RecordReader(KEYS).read({key: KeyValue(key, value.encode(), 1, 1, 1, 0) for key, value in keys.items()})


def test_control_keys_are_read() -> None:
    records = read(pause="true", stop="", cordon__a="ECC errors", cordon__b__2='{"by": "ada"}')
    assert records.paused
    assert records.stop == Order()
    assert records.cordons == (Cordon("a", None, Order("ECC errors")), Cordon("b", 2, Order(by="ada")))


def test_nonsense_in_a_control_key_is_ignored_and_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        records = read(pause="ture", cordon__a__x="")
    assert not records.paused
    assert not records.cordons
    assert "'ture' is neither true nor false" in caplog.text
    assert "write control/cordon/NODE" in caplog.text
