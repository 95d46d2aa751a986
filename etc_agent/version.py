"""Which release of etc-run this is. `setup.cfg` alone says it; here it is read from what pip has installed."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version


def version() -> str:
    """Such as "0.1.0"; "unknown" for a checkout that was never installed."""
    try:
        return installed_version("etc-run")
    except PackageNotFoundError:
        return "unknown"
