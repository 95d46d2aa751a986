"""The user's own commands and signals around a job: the preflight check, the preemption probe, and forwarded
signals; and its checkpoints."""

from __future__ import annotations

import shlex

from etc_agent.agent.safety.signals import Signals, parse_signals
from etc_agent.agent.settings import Preemption, UserCommand
from etc_agent.control.checkpoint_settings import Checkpoint
from etc_agent.errors import EtcError
from launcher.given import Given
from launcher.job import PreemptionSection, PreflightSection


def preflight(given: Given) -> UserCommand | None:
    """The command that must succeed before this node joins, if any."""
    words = _words(given, "preflight")
    section = PreflightSection(command=words) if words else given.job.preflight
    return UserCommand(tuple(section.command), section.timeout_s) if section else None


def preemption(given: Given) -> Preemption | None:
    """The command that tells when this node is taken away, if any. An option changes the job file's command, not its
    times."""
    section, words = given.job.preemption, _words(given, "preemption_probe")
    if words:
        section = section.model_copy(update={"command": words}) if section else PreemptionSection(command=words)
    if section is None:
        return None
    return Preemption(UserCommand(tuple(section.command), section.timeout_s), section.every_s, section.grace_s)


def checkpoint(given: Given) -> Checkpoint | None:
    """Where and when the job writes checkpoints, if it does.

    Raises:
        EtcError: a variable of the environment is not of its form.
    """
    section = given.job.checkpoint
    if (said := Checkpoint.read()) is not None or section is None:
        return said
    return Checkpoint(
        str(section.folder), section.every_steps or 0, section.every_s, section.keep,
        section.stop_s if section.on_stop else 0.0,
    )


def forward_signals(given: Given, to_handle: str) -> Signals:
    """The signals that are forwarded to the workers. `to_handle`: those that make a node leave.

    Raises:
        EtcError: one is unknown, cannot be handled, or already makes the node leave.
    """
    names = given.option("forward_signals") or ",".join(given.job.forward_signals)
    source = given.source("forward_signals", "forward_signals")
    signals = parse_signals(names, source) if names else ()
    if taken := set(signals) & set(parse_signals(to_handle)):
        name = min(taken).name
        raise EtcError(
            f"{source}: {name} is among --signals-to-handle, by which the node leaves; leave it out here or there"
        )
    return signals


def _words(given: Given, option: str) -> list[str]:
    text = given.option(option)
    try:
        return shlex.split(text) if text else []
    except ValueError as error:
        raise EtcError(f"{given.source(option, option)}: {text!r} is not a command: {error}") from None
