"""Hugging Face's transformers in `build`: `from_pretrained` makes the model's structure there, and reads no weights.

`build` runs on the meta device, where transformers refuses `from_pretrained`. The weights come from `TrainState.init`:
with "module", `build` is called once on the real device, where `from_pretrained` loads them as anywhere else; with a
folder, each rank reads its part of the files. Everything else that `from_pretrained` does stays as it is: it reads the
config and the dtype, applies `DistributedConfig` in this generation's world, and ties weights.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, Final

_MODELS: Final = "transformers.modeling_utils"

NAMES: Final = (
    f"{_MODELS}.check_and_set_device_map",
    f"{_MODELS}.PreTrainedModel._load_pretrained_model",
    f"{_MODELS}.PreTrainedModel._finalize_model_loading",
    f"{_MODELS}.LoadStateDictInfo",
)
"""What is replaced or used here beyond the documented interface; a test checks that they exist."""

_is_structural: ContextVar[bool] = ContextVar("structural", default=False)


@contextlib.contextmanager
def structure_alone() -> Iterator[None]:
    """Within the context, in this thread alone, `from_pretrained` reads no weights and leaves the model on the meta
    device. Does nothing where the script has not imported transformers."""
    if "transformers" not in sys.modules:
        yield
        return
    _install()
    token = _is_structural.set(True)
    try:
        yield
    finally:
        _is_structural.reset(token)


@functools.cache
def _install() -> None:
    models: Any = importlib.import_module(_MODELS)
    model_class = models.PreTrainedModel
    check, load, finalize = (
        models.check_and_set_device_map, model_class._load_pretrained_model, model_class._finalize_model_loading
    )

    @functools.wraps(check)
    def check_device_map(device_map: Any) -> Any:
        return None if _is_structural.get() else check(device_map)

    @functools.wraps(load)
    def load_weights(model: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_structural.get():
            return load(model, *args, **kwargs)
        return models.LoadStateDictInfo(set(), set(), set(), [], {}, set()), None

    @functools.wraps(finalize)
    def finalize_loading(model: Any, load_config: Any, loading_info: Any) -> Any:
        if not _is_structural.get():
            return finalize(model, load_config, loading_info)
        model.tie_weights(recompute_mapping=False)
        return loading_info

    models.check_and_set_device_map = check_device_map
    model_class._load_pretrained_model = staticmethod(load_weights)
    model_class._finalize_model_loading = staticmethod(finalize_loading)
