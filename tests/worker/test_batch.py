"""Batches of samples, as `session.batch` gives them."""

from __future__ import annotations

import pytest
import torch

from etc_agent.worker.data.batch import batch_of

CPU = torch.device("cpu")


def test_data_that_is_too_short_for_the_steps_is_named_with_the_remedy() -> None:
    data = torch.arange(8)
    assert batch_of(data, [6, 7], CPU).tolist() == [6, 7]
    with pytest.raises(IndexError, match=r"^session.batch\(data\): data has no sample 8 .*sample i % len") as caught:
        batch_of(data, [7, 8], CPU)
    assert len(str(caught.value).splitlines()) == 1
