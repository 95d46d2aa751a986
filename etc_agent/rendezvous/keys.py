"""The names of the keys of one run (docs/architecture.md has the table)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from etc_agent.rendezvous.etcd.errors import EtcdError

DEFAULT_PREFIX = "/etc-run"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,127}")


def _check_name(what: str, name: str) -> str:
    if not _NAME.fullmatch(name):
        raise EtcdError(
            f"{what} {name!r} cannot be part of an etcd key; use 1 to 128 letters, digits and . _ : @ -, "
            "beginning with a letter or digit"
        )
    return name


@dataclass(frozen=True, slots=True)
class JobKeys:
    """Every key of run `run_id` under `prefix`.

    Raises:
        EtcdError: run_id or prefix cannot be used in keys.
    """

    run_id: str
    prefix: str = DEFAULT_PREFIX

    def __post_init__(self) -> None:
        _check_name("run id", self.run_id)
        if not re.fullmatch(r"(/[A-Za-z0-9._:@-]+)+", self.prefix):
            raise EtcdError(f"etcd prefix {self.prefix!r} is not of the form /name or /name/name")

    @property
    def root(self) -> str:
        """The prefix of all keys of this run; ends in a slash, so that run `a` does not contain run `ab`."""
        return f"{self.prefix}/{self.run_id}/"

    @property
    def job(self) -> str:
        return self.root + "job"

    @property
    def nodes_prefix(self) -> str:
        return self.root + "nodes/"

    def node(self, node: str) -> str:
        return self.nodes_prefix + _check_name("node name", node)

    @property
    def gone_prefix(self) -> str:
        return self.root + "gone/"

    def gone(self, node: str) -> str:
        return self.gone_prefix + _check_name("node name", node)

    @property
    def leader(self) -> str:
        return self.root + "leader"

    @property
    def generations_prefix(self) -> str:
        return self.root + "generations/"

    def generation(self, generation: int) -> str:
        return f"{self.generations_prefix}{generation}"

    @property
    def current(self) -> str:
        return self.root + "current"

    @property
    def acks_prefix(self) -> str:
        return self.root + "acks/"

    def generation_acks_prefix(self, generation: int) -> str:
        return f"{self.acks_prefix}{generation}/"

    def ack(self, generation: int, node: str) -> str:
        return self.generation_acks_prefix(generation) + _check_name("node name", node)

    @property
    def history_prefix(self) -> str:
        return self.root + "history/"

    def history(self, generation: int) -> str:
        return f"{self.history_prefix}{generation}"

    @property
    def account(self) -> str:
        return self.root + "account"

    @property
    def control_prefix(self) -> str:
        return self.root + "control/"

    @property
    def scale(self) -> str:
        return self.control_prefix + "scale"

    @property
    def drains_prefix(self) -> str:
        return self.control_prefix + "drain/"

    def drain(self, node: str) -> str:
        return self.drains_prefix + _check_name("node name", node)

    @property
    def pause(self) -> str:
        return self.control_prefix + "pause"

    @property
    def preview(self) -> str:
        return self.control_prefix + "preview"

    @property
    def preview_reply(self) -> str:
        return self.control_prefix + "preview-reply"

    @property
    def stop(self) -> str:
        return self.control_prefix + "stop"

    @property
    def cordons_prefix(self) -> str:
        return self.control_prefix + "cordon/"

    def cordon(self, node: str, index: int | None = None) -> str:
        """Of a whole node, or of the slot with this local index."""
        return self.cordons_prefix + _check_name("node name", node) + ("" if index is None else f"/{index}")

    @property
    def reply(self) -> str:
        return self.control_prefix + "reply"

    @property
    def status(self) -> str:
        return self.root + "status"

    # Of a plain torchrun with --rdzv-backend=etcd-v3; see roster.py.

    @property
    def torchrun_prefix(self) -> str:
        return self.root + "torchrun/"

    @property
    def torchrun_roster(self) -> str:
        return self.torchrun_prefix + "roster"

    @property
    def torchrun_nodes_prefix(self) -> str:
        return self.torchrun_prefix + "nodes/"

    def torchrun_node(self, node: str) -> str:
        return self.torchrun_nodes_prefix + _check_name("node name", node)
