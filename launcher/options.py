"""The options of ``etc-run``: torchrun's own parser plus a few options, and which of them were given."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.run import get_args_parser

from etc_agent.control.channel import SOCKET_VARIABLE
from etc_agent.control.environment import PARALLEL_VARIABLE
from etc_agent.errors import EtcError
from etc_agent.version import version

ELASTIC_BACKEND = "etcd-v3"

# Option -> the variable that can be set instead. Passwords come from a file or from ETC_PASSWORD, never from an option.
_VARIABLES = {
    "config": "ETC_CONFIG",
    "parallel": "ETC_PARALLEL",
    "allowed": "ETC_ALLOWED",
    "preflight": "ETC_PREFLIGHT",
    "preemption_probe": "ETC_PREEMPTION_PROBE",
    "forward_signals": "ETC_FORWARD_SIGNALS",
    "metrics_port": "ETC_METRICS_PORT",
    "events": "ETC_EVENTS",
    "verdict": "ETC_VERDICT",
    "left_exit_code": "ETC_LEFT_EXIT_CODE",
    "port_range": "ETC_PORT_RANGE",
    "etcd_endpoints": "ETC_ENDPOINTS",
    "etcd_prefix": "ETC_PREFIX",
    "etcd_user": "ETC_USER",
    "etcd_password_file": "ETC_PASSWORD_FILE",
    "etcd_ca_file": "ETC_CA_FILE",
    "etcd_cert_file": "ETC_CERT_FILE",
    "etcd_key_file": "ETC_KEY_FILE",
}
_HELP = {
    "config": ("JOB.YAML", "Job file. The command line and the environment win over it."),
    "parallel": ("PP2TP2DP1", "Parallel config to start with."),
    "allowed": ("PP2TP2DP1,...", "The only parallel configs that may be chosen, with commas between them."),
    "preflight": ("COMMAND", "Must exit 0 before this node joins the job."),
    "preemption_probe": ("COMMAND", "Run every 5 s; once it exits 0 this node hands over its state and leaves."),
    "forward_signals": ("SIGUSR1,...", "Signals to etc-run that are handed on to this node's workers."),
    "metrics_port": ("[HOST:]PORT", "Serve /metrics, /healthz and /readyz there; HOST is 127.0.0.1 unless given."),
    "events": ("FILE", "Append what happens to FILE, a JSON object a line; {node} in it is replaced."),
    "left_exit_code": ("CODE", "Exit code of a node that was taken away and has left the job (default: 0)."),
    "verdict": ("FILE", "Say in FILE how and why etc-run ends on this node; {node} in it is replaced."),
    "port_range": ("29500-29599", "The TCP ports at which this node's agent may listen (default: any free one)."),
    "etcd_endpoints": ("HOST:PORT,...", "etcd v3 servers, with commas between them; https://HOST:PORT for TLS."),
    "etcd_prefix": ("/PREFIX", "All keys lie under this prefix and the run id (default: /etc-run)."),
    "etcd_user": ("NAME", "etcd user. Its password comes from ETC_PASSWORD or --etcd-password-file."),
    "etcd_password_file": ("FILE", "File that holds the etcd password."),
    "etcd_ca_file": ("PEM", "Certificate authority of etcd's certificate; turns TLS on."),
    "etcd_cert_file": ("PEM", "Client certificate."),
    "etcd_key_file": ("PEM", "Key of the client certificate."),
}


@dataclass(frozen=True, slots=True)
class CommandLine:
    """Options as parsed: `args` has torchrun's names plus ours, defaults and environment filled in.

    `typed`, `from_environment`: the names given there, each with how it was given, for messages (``--nnodes``,
    ``PET_NNODES``). A typed option hides its variable.
    """

    args: argparse.Namespace
    typed: Mapping[str, str]
    from_environment: Mapping[str, str]

    def given(self, name: str) -> str | None:
        """How option `name` was given; None where `args` only has the default."""
        return self.typed.get(name) or self.from_environment.get(name)

    @property
    def our_options_typed(self) -> list[str]:
        """The options that torchrun does not know, as typed."""
        return [spelled for name, spelled in self.typed.items() if name in _VARIABLES]


class _Parser(argparse.ArgumentParser):
    """Accepts an abbreviated option of torchrun only if it is unambiguous.

    argparse also looks at words after the training script, and refuses one that could abbreviate two options: with it,
    ``train.py --m 1`` would be an error. Options that torchrun does not have cannot be abbreviated.
    """

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        ours = (*_VARIABLES, "version")
        found = [match for match in super()._get_option_tuples(option_string) if match[0].dest not in ours]
        return found[:1] if len({match[0].dest for match in found}) == 1 else []


def build_parser() -> argparse.ArgumentParser:
    """torchrun's parser plus ours. The training script becomes optional, since a job file may name it.

    Raises:
        EtcError: the variable of a flag is not a number.
    """
    try:
        parser = _Parser(
            prog="etc-run", parents=[get_args_parser()], add_help=False,
            description="Starts a training job as torchrun does, and changes its size while it trains.",
        )
    except ValueError as error:
        raise EtcError(f"a PET_ variable that stands for a flag must be 0 or 1: {error}") from None
    (script,) = (action for action in parser._actions if action.dest == "training_script")
    script.nargs, script.required = "?", False
    group = parser.add_argument_group("elastic jobs")
    for name, variable in _VARIABLES.items():
        metavar, text = _HELP[name]
        # Defaults are not part of the help: a percent sign in a value would break argparse's formatting.
        group.add_argument(
            f"--{name.replace('_', '-')}", f"--{name}", default=_environment(variable), metavar=metavar,
            help=f"{text} [{variable}]",
        )
    group.add_argument("--version", action="version", dest="version", version=f"etc-run {version()}")
    return parser


def parse_command_line(argv: Sequence[str]) -> CommandLine:
    """Parse `argv` (without the program's name).

    Raises:
        SystemExit: as torchrun's parser does, with its message and code.
    """
    parser = build_parser()
    # argparse does not overwrite what a namespace already has, so names that still have the marker were typed nowhere.
    names = _names(parser)
    marker = object()
    marked = parser.parse_args(argv, argparse.Namespace(**dict.fromkeys(names, marker)))
    args = parser.parse_args(argv)
    typed = {name: f"--{name.replace('_', '-')}" for name in names if getattr(marked, name) is not marker}
    if args.training_script is None:
        del typed["training_script"], typed["training_script_args"]
        if not args.config:
            parser.error("the following arguments are required: training_script, training_script_args")
    return CommandLine(args, typed, _from_environment(parser, typed))


def typed_before_script(argv: Sequence[str], name: str) -> str | None:
    """The value of option `name` in a command line that the parser refuses; what stands behind the training script
    belongs to that."""
    options = {spelled: action for action in build_parser()._actions for spelled in action.option_strings}
    words = iter(argv)
    for word in words:
        spelled, equals, value = word.partition("=")
        if not spelled.startswith("-"):
            return None
        action = options.get(spelled)
        if action is None or action.nargs == 0:
            continue
        found = value if equals else next(words, None)
        if action.dest == name:
            return found
    return None


def command_line_of(args: argparse.Namespace) -> CommandLine:
    """The command line that is equivalent to arguments which this parser, or torchrun's own, has read for a program.
    Values that differ from the defaults count as typed."""
    parser = build_parser()
    whole = argparse.Namespace(**{**vars(parser.parse_args(["x"])), **vars(args)})
    typed = {
        name: f"--{name.replace('_', '-')}" for name in _names(parser)
        if getattr(whole, name) != parser.get_default(name)
    }
    return CommandLine(whole, typed, _from_environment(parser, typed))


def _names(parser: argparse.ArgumentParser) -> list[str]:
    return list(vars(parser.parse_args(["x"])))


def _from_environment(parser: argparse.ArgumentParser, typed: Mapping[str, str]) -> dict[str, str]:
    found = {}
    for name in _names(parser):
        variable = _VARIABLES.get(name) or f"PET_{name.upper()}"
        value = _environment(variable)
        if value and name not in typed and _reads(parser.get_default(name), value):
            found[name] = variable
    return found


def _environment(variable: str) -> str | None:
    """ETC_PARALLEL is set for workers to tell their job's config; an etc-run that a worker starts must not read it."""
    if variable == PARALLEL_VARIABLE and SOCKET_VARIABLE in os.environ:
        return None
    return os.environ.get(variable) or None


def _reads(default: object, value: str) -> bool:
    """Whether an option's default came from the variable's value: not every torchrun option has a variable."""
    return isinstance(default, bool) or default == value
