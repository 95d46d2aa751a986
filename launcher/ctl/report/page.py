"""The page, from a job's life."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from etc_agent.version import version
from launcher.ctl.report.drawing import WIDTH, draw
from launcher.ctl.report.life import Life
from launcher.ctl.show.tables import size
from launcher.ctl.show.times import length, when

_NAME = "page.html.j2"


def page_of(life: Life, now: float) -> str:
    """The HTML page. It stands alone: no script, no style, picture or font from elsewhere."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
    )
    environment.filters.update(when=when, size=size, length_of=length)
    kept = len(life.eras) + len(life.withdrawn)
    return environment.get_template(_NAME).render(
        life=life, job=life.job, drawing=draw(life), now=now, version=version(), width=WIDTH,
        restarts=sum(life.account.restarts.values()), older=max(0, sum(life.account.changes.values()) - kept),
    )
