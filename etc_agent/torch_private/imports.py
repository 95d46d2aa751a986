"""Parts of PyTorch that it imports by itself when they are first needed, at a moment that is inconvenient."""

from __future__ import annotations

from importlib import import_module

NAMES = ("torch._dynamo",)

COMPILER = "torch._dynamo"
"""What the first step of any optimizer imports. It takes longer than all the rest of PyTorch."""


def import_compiler() -> None:
    """Import it now."""
    import_module(COMPILER)
