"""Process groups without peers, with which a rank of any size can be built in one process."""

from __future__ import annotations

import torch.distributed as dist

NAMES = ("torch.testing._internal.distributed.fake_pg.FakeStore",)


def fake_store() -> dist.Store:
    """A store for ``init_process_group("fake", store=...)``. Making one registers the backend ``fake``."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()
