"""A warm spare: a worker's process, started before it is needed, with the libraries imported and nothing else done.

``python -m etc_agent.worker.process.spare SCRIPT ARGS`` or ``... -m MODULE ARGS``. It imports what will be needed,
waits for the agent to send the environment of a worker, and then runs the script as Python itself would.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import importlib.util
import os
import runpy
import site
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType, TracebackType

from etc_agent.control.channel import SLOT_VARIABLE, SOCKET_VARIABLE, SPARE_GENERATION, Channel
from etc_agent.control.messages import Begin, Hello, Warm
from etc_agent.torch_private.imports import COMPILER

_ALWAYS = ("torch", "torch.distributed.tensor.parallel", "etc_agent.worker.session", COMPILER)
"""The last takes the longest."""


def main() -> None:
    """Get warm, wait, become a worker. Ends when the agent does."""
    command = sys.argv[1:]
    if not sys.flags.safe_path:
        del sys.path[0]  # where `-m` looks first; the script's own folder comes there later
    channel = Channel.connect(os.environ[SOCKET_VARIABLE])
    channel.send(Hello(int(os.environ[SLOT_VARIABLE]), os.getpid(), SPARE_GENERATION, in_session=False))
    for name in _ALWAYS:
        _import(name)
    for name, parts in _imported_by(_source(command)):
        _import(name, parts)
    with suppress(OSError):  # the agent is gone, and `receive` says so
        channel.send(Warm())
    message = channel.receive()
    channel.close()
    if not isinstance(message, Begin):
        return
    os.environ.update(message.environment)
    if not sys.flags.safe_path:
        sys.path.insert(0, os.getcwd() if command[0] == "-m" else str(Path(command[0]).resolve().parent))
    if command[0] == "-m":
        sys.argv = command[1:]
        # What `python -m` itself calls: the public run_module makes a `__main__` for a while only.
        _run(lambda main: runpy._run_module_as_main(command[1]))  # type: ignore[attr-defined]
    else:
        sys.argv = command
        _run(lambda main: _run_script(os.path.abspath(command[0]), main))


def _run_script(script: str, main: ModuleType) -> None:
    main.__dict__.update(__file__=script, __loader__=SourceFileLoader("__main__", script), __cached__=None)
    exec(compile(Path(script).read_bytes(), script, "exec", dont_inherit=True), main.__dict__)


def _run(run: Callable[[ModuleType], object]) -> None:
    """Call `run` with a new main module; what it raises is shown as if Python had run the script."""
    sys.modules["__main__"] = main = ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __annotations__={})
    try:
        run(main)
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:
        traceback = _without(error.__traceback__, (__file__, runpy.__file__, "<frozen runpy>"))
        sys.excepthook(type(error), error.with_traceback(traceback), traceback)
        sys.exit(1)


def _without(traceback: TracebackType | None, files: tuple[str, ...]) -> TracebackType | None:
    """`traceback` from the first frame on that is in none of `files`."""
    while traceback is not None and traceback.tb_frame.f_code.co_filename in files:
        traceback = traceback.tb_next
    return traceback


def _source(command: list[str]) -> bytes:
    """Of what will be run; empty where it is not found. Nothing of it is imported, packages around it included."""
    if command[0] != "-m":
        origin: str | None = command[0]
    else:
        origin, places = None, [os.getcwd(), *sys.path]
        parts = command[1].split(".")
        for end in range(1, len(parts) + 1):
            spec = PathFinder.find_spec(".".join(parts[:end]), places)
            if spec is None:
                return b""
            origin, places = spec.origin, spec.submodule_search_locations or []
        if places:  # a package: its `__main__` is run
            origin = os.path.join(places[0], "__main__.py")
    try:
        return Path(origin or "").read_bytes()
    except OSError:
        return b""


def _imported_by(source: bytes) -> Iterator[tuple[str, list[str]]]:
    """Installed modules that a script imports at its top, and what it wants from each: whatever else it imports may do
    anything."""
    try:
        statements = ast.parse(source).body
    except (SyntaxError, ValueError):
        return
    while statements:
        match statements.pop(0):
            case ast.Import(names):
                yield from ((alias.name, []) for alias in names if _is_installed(alias.name))
            case ast.ImportFrom(str(name), names, 0) if _is_installed(name):
                yield name, [alias.name for alias in names]
            case ast.Try(body):
                statements = [*body, *statements]


def _is_installed(name: str) -> bool:
    try:
        spec = importlib.util.find_spec(name.partition(".")[0])
    except (ImportError, ValueError):
        return False
    if spec is None or spec.origin is None:
        return False
    places = (*site.getsitepackages(), site.getusersitepackages(), sysconfig.get_path("stdlib"))
    return spec.origin in ("built-in", "frozen") or spec.origin.startswith(places)


def _import(name: str, parts: Iterable[str] = ()) -> None:
    """Import module `name`, and those of its `parts` that are modules."""
    try:
        module = importlib.import_module(name)
        for part in parts:
            if part != "*" and not hasattr(module, part):
                importlib.import_module(f"{name}.{part}")
    except (Exception, SystemExit):
        pass  # the script will meet the same, and say so


if __name__ == "__main__":
    # In a module of its own name: `__main__` becomes the script's.
    from etc_agent.worker.process import spare

    spare.main()
