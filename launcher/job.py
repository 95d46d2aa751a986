"""The YAML job file: what a job is, without the command line.

`load_job` reads one and reports every mistake in it, each on a line of its own with the field's path, such as
``job.yaml: parallel.allowed[2]: PP2TP3DP1: 4 heads cannot be divided over tp=3; choose tp from 1, 2, 4``.
``configs/example.yaml`` shows every field.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from etc_agent.agent.settings import ModelFacts, config_refusal
from etc_agent.control.checkpoint_settings import DEFAULT_KEEP
from etc_agent.control.redundancy import Redundancy, Scheme
from etc_agent.errors import EtcError
from etc_agent.parallel.config import ParallelConfig
from etc_agent.rendezvous.ports import PortRange
from launcher.mistakes import mistake

_SET_BY_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


class JobFileError(EtcError):
    """What is wrong with a job file: one line per mistake."""

    def __init__(self, file: str, mistakes: Sequence[str]) -> None:
        super().__init__("\n".join(f"{file}: {mistake}" for mistake in mistakes))


# ---- field types ---------------------------------------------------------------------------------------------------


def _words(value: Any) -> Any:
    """A command as one line, or as a list of words and numbers."""
    if isinstance(value, str):
        return shlex.split(value)
    if isinstance(value, list):
        return [str(word) if type(word) in (int, float) else word for word in value]
    raise ValueError("write the command as one line, or as a list of words")


def _config(value: Any) -> ParallelConfig:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a parallel config; write it like PP2TP2DP1")
    return ParallelConfig.parse(value)


def _workers(value: Any) -> int | str:
    if value in ("auto", "cpu", "gpu", "xpu"):
        return value
    if type(value) is not int or value < 1:
        raise ValueError(f"expected a positive integer, or one of auto, cpu, gpu, xpu; got {value!r}")
    return value


def _streams(value: Any) -> str:
    """torchrun's form for --redirects and --tee."""
    if type(value) not in (int, str):
        raise ValueError(f"expected 0 to 3 or like 0:1,1:3 (local rank:streams); got {value!r}")
    return str(value)


def _ports(value: Any) -> PortRange:
    if not isinstance(value, str):
        raise ValueError(f"expected a range of ports like 29500-29599; got {value!r}")
    return PortRange.parse(value)


def _path(value: Any, info: ValidationInfo) -> Path:
    if not isinstance(value, str) or not value:
        raise ValueError(f"expected a path; got {value!r}")
    assert info.context is not None
    folder: Path = info.context["folder"]
    return folder / Path(value).expanduser()


def _nodes(value: Any) -> Any:
    """A single number is used for both bounds."""
    if type(value) is int and value < 1:
        raise ValueError(f"expected at least 1, got {value}")
    return {"min": value, "max": value} if type(value) is int else value


def _not_launchers(value: dict[str, str]) -> dict[str, str]:
    if taken := [name for name in value if name in _SET_BY_LAUNCHER]:
        raise ValueError(f"{', '.join(taken)}: set by etc-run for every worker; leave out")
    return value


PositiveInt = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Config = Annotated[ParallelConfig, PlainValidator(_config)]
RelativePath = Annotated[Path, PlainValidator(_path)]
Text = Annotated[str, Field(min_length=1)]
Ports = Annotated[PortRange, PlainValidator(_ports)]


# ---- the schema ----------------------------------------------------------------------------------------------------


class Section(BaseModel):
    """A mapping in the file: strict types, no unknown fields."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, arbitrary_types_allowed=True)


class NodesSection(Section):
    min: PositiveInt = 1
    max: PositiveInt = 1

    @model_validator(mode="after")
    def _ordered(self) -> NodesSection:
        if self.min > self.max:
            raise ValueError(f"min {self.min} is above max {self.max}")
        return self


class TlsSection(Section):
    ca_file: RelativePath | None = None
    cert_file: RelativePath | None = None
    key_file: RelativePath | None = None

    @model_validator(mode="after")
    def _paired(self) -> TlsSection:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("cert_file and key_file go together; give both or neither")
        return self


class RendezvousSection(Section):
    run_id: Text | None = None
    endpoints: list[Text] = []
    prefix: Text | None = None
    user: Text | None = None
    password_file: RelativePath | None = None
    tls: TlsSection = TlsSection()


class ParallelSection(Section):
    initial: Config | None = None
    allowed: Annotated[list[Config], Field(min_length=1)] | None = None
    pack: bool | None = None


class ModelSection(Section):
    layers: PositiveInt | None = None
    heads: PositiveInt | None = None
    hidden: PositiveInt | None = None


class LogsSection(Section):
    dir: RelativePath | None = None
    redirects: Annotated[str, PlainValidator(_streams)] | None = None
    tee: Annotated[str, PlainValidator(_streams)] | None = None
    local_ranks_filter: list[Annotated[int, Field(ge=0)]] | None = None


class TimeoutsSection(Section):
    """The waits of `etc_agent.agent.settings.Timeouts`, by the same names; its defaults count where None."""

    lease_s: Seconds | None = None
    settle_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    join_s: Seconds | None = None
    start_s: Seconds | None = None
    prepare_s: Seconds | None = None
    switch_s: Seconds | None = None
    drain_s: Seconds | None = None
    hang_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    shutdown_grace_s: Seconds | None = None
    etcd_s: Seconds | None = None
    end_s: Seconds | None = None
    retry_s: Seconds | None = None
    freeze_s: Seconds | None = None


class FailuresSection(Section):
    """What follows from the failures of workers; see `etc_agent.agent.settings.Failures`."""

    raised: Annotated[Literal["restart", "replace"], Field(alias="raise")] = "restart"
    max_per_window: Annotated[int, Field(ge=0)] = 3
    window_s: Seconds = 600.0


def _command_only(value: Any) -> Any:
    """A command alone is short for the section."""
    return value if isinstance(value, dict) else {"command": value}


class PreflightSection(Section):
    command: Annotated[list[Text], BeforeValidator(_words), Field(min_length=1)]
    timeout_s: Seconds = 300.0


class PreemptionSection(Section):
    command: Annotated[list[Text], BeforeValidator(_words), Field(min_length=1)]
    every_s: Seconds = 5.0
    timeout_s: Seconds = 5.0
    grace_s: Seconds | None = None


def _scheme_only(value: Any) -> Any:
    """A scheme alone is short for the section."""
    return value if isinstance(value, dict) else {"scheme": value}


def _scheme(value: Any) -> Scheme:
    if value not in list(Scheme):
        raise ValueError(f"expected none, peer or parity; got {value!r}")
    return Scheme(value)


class RedundancySection(Section):
    scheme: Annotated[Scheme, PlainValidator(_scheme)]
    every: PositiveInt = Redundancy().every


def _folder_only(value: Any) -> Any:
    """A folder alone is short for the section."""
    return {"folder": value} if isinstance(value, str) else value


class CheckpointSection(Section):
    """See `etc_agent.control.checkpoint_settings.Checkpoint`; `stop_s` is its `on_stop_s`, where `on_stop` is true."""

    folder: RelativePath
    every_steps: PositiveInt | None = None
    every_s: Seconds | None = None
    keep: PositiveInt = DEFAULT_KEEP
    on_stop: bool = False
    stop_s: Seconds = 120.0


class TelemetrySection(Section):
    metrics_port: Text | Annotated[int, Field(ge=0)] | None = None
    events: RelativePath | None = None
    verdict: RelativePath | None = None
    left_exit_code: Annotated[int, Field(ge=0, le=125)] = 0


class Job(Section):
    """A whole job file. A None field is not given, so that the environment, or the default, decides."""

    command: Annotated[list[Text], BeforeValidator(_words), Field(min_length=1)] | None = None
    run_as: Literal["script", "module", "program"] = "script"
    nodes: Annotated[NodesSection, BeforeValidator(_nodes)] | None = None
    workers_per_node: Annotated[int | str, PlainValidator(_workers)] | None = None
    rendezvous: RendezvousSection = RendezvousSection()
    parallel: ParallelSection = ParallelSection()
    model: ModelSection = ModelSection()
    global_batch: PositiveInt | None = None
    max_restarts: Annotated[int, Field(ge=0)] | None = None
    preflight: Annotated[PreflightSection, BeforeValidator(_command_only)] | None = None
    preemption: Annotated[PreemptionSection, BeforeValidator(_command_only)] | None = None
    checkpoint: Annotated[CheckpointSection, BeforeValidator(_folder_only)] | None = None
    forward_signals: list[Text] = []
    port_range: Ports | None = None
    spares: Literal["warm", "cold", "reserve"] = "warm"
    redundancy: Annotated[RedundancySection, BeforeValidator(_scheme_only)] = RedundancySection(scheme=Scheme.NONE)
    alike_failures: Annotated[int, Field(ge=0)] = 0
    failures: FailuresSection = FailuresSection()
    monitor_interval_s: Seconds | None = None
    timeouts: TimeoutsSection = TimeoutsSection()
    logs: LogsSection = LogsSection()
    telemetry: TelemetrySection = TelemetrySection()
    env: Annotated[dict[str, str], AfterValidator(_not_launchers)] = {}

    @property
    def model_facts(self) -> ModelFacts:
        return ModelFacts(**self.model.model_dump())


# ---- reading -------------------------------------------------------------------------------------------------------


class _UniqueKeysLoader(yaml.SafeLoader):
    """YAML in which giving a key twice is an error; PyYAML would silently use the last one."""


def _unique_mapping(loader: _UniqueKeysLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    loader.flatten_mapping(node)
    mapping: dict[Any, Any] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str):
            raise yaml.constructor.ConstructorError(None, None, f"{key!r} is not a field name", key_node.start_mark)
        if key in mapping:
            raise yaml.constructor.ConstructorError(None, None, f"{key} is given twice", key_node.start_mark)
        mapping[key] = loader.construct_object(value_node, deep=True)
    return mapping


_UniqueKeysLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _unique_mapping)


def load_job(path: Path) -> Job:
    """Read and check the job file at `path`. Relative paths in it start at its own folder.

    Raises:
        JobFileError: it cannot be read, or has mistakes; one line for each.
    """
    name = str(path)
    try:
        value = yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeysLoader)
    except OSError as error:
        raise JobFileError(name, [f"cannot be read: {error.strerror}"]) from None
    except UnicodeDecodeError:
        raise JobFileError(name, ["is not UTF-8 text"]) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise JobFileError(name, [f"{where}{error.problem}"]) from None
    except yaml.YAMLError as error:
        raise JobFileError(name, [" ".join(str(error).split())]) from None
    if not isinstance(value, dict):
        raise JobFileError(name, [f"expected fields like 'command: train.py'; known: {', '.join(Job.model_fields)}"])
    try:
        job = Job.model_validate(value, context={"folder": path.parent.absolute()})
    except ValidationError as error:
        raise JobFileError(name, [mistake(item, Job) for item in error.errors()]) from None
    if mistakes := list(_impossible(job)):
        raise JobFileError(name, mistakes)
    return job


def _impossible(job: Job) -> Iterator[str]:
    """What each field allows, but not together. Bounds that the command line may still move are checked after it."""
    configs = [] if job.parallel.initial is None else [("parallel.initial", job.parallel.initial)]
    configs += [(f"parallel.allowed[{i}]", config) for i, config in enumerate(job.parallel.allowed or [])]
    for path, config in configs:
        allowed = None if job.parallel.allowed is None else tuple(job.parallel.allowed)
        reason = config_refusal(
            config, allowed=allowed, model=job.model_facts, global_batch=job.global_batch
        )
        if reason is not None:
            yield f"{path}: {reason}"
