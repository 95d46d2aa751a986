"""A warm spare: a worker's process, started before it is needed, with the libraries imported and nothing else done.

``python -m etc_agent.worker.spare SCRIPT ARGS`` or ``... -m MODULE ARGS``. It imports what will be needed, waits for
the agent to send the environment of a worker, and then runs the script as Python itself would.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import runpy
import site
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, TracebackType

from etc_agent.control.channel import SLOT_VARIABLE, SOCKET_VARIABLE, SPARE_GENERATION, Channel
from etc_agent.control.messages import Begin, Hello

_ALWAYS = ("torch", "torch.distributed.tensor.parallel", "etc_agent.worker.session")


def main() -> None:
    """Get warm, wait, become a worker. Ends when the agent does."""
    command = sys.argv[1:]
    del sys.path[0]  # where `-m` looks first; the script's own folder comes there later
    channel = Channel.connect(os.environ[SOCKET_VARIABLE])
    channel.send(Hello(int(os.environ[SLOT_VARIABLE]), os.getpid(), SPARE_GENERATION, in_session=False))
    for name in (*_ALWAYS, *_imported_by(command)):
        _import(name)
    message = channel.receive()
    channel.close()
    if not isinstance(message, Begin):
        return
    os.environ.update(message.environment)
    if command[0] == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv = command[1:]
        _run(lambda: runpy.run_module(command[1], run_name="__main__", alter_sys=True))
    else:
        sys.path.insert(0, str(Path(command[0]).resolve().parent))
        sys.argv = command
        _run(lambda: _run_script(command[0]))


def _run_script(script: str) -> None:
    module = ModuleType("__main__")
    module.__file__ = os.path.abspath(script)
    module.__dict__.update(__builtins__=__builtins__, __cached__=None)
    sys.modules["__main__"] = module
    exec(compile(Path(script).read_bytes(), script, "exec", dont_inherit=True), module.__dict__)


def _run(run: object) -> None:
    """Call `run`; what it raises is shown as if Python had run the script."""
    assert callable(run)
    try:
        run()
    except SystemExit:
        raise
    except BaseException as error:
        own = str(Path(__file__))
        traceback = _without(error.__traceback__, (own, runpy.__file__, "<frozen runpy>"))
        sys.excepthook(type(error), error.with_traceback(traceback), traceback)
        sys.exit(130 if isinstance(error, KeyboardInterrupt) else 1)


def _without(traceback: TracebackType | None, files: tuple[str, ...]) -> TracebackType | None:
    """`traceback` from the first frame on that is in none of `files`."""
    while traceback is not None and traceback.tb_frame.f_code.co_filename in files:
        traceback = traceback.tb_next
    return traceback


def _imported_by(command: list[str]) -> Iterator[str]:
    """Installed modules that the script imports at its top: whatever else it imports may do anything."""
    try:
        if command[0] == "-m":
            found = importlib.util.find_spec(command[1].partition(".")[0])
            source = Path(found.origin).read_bytes() if found and found.origin else b""
        else:
            source = Path(command[0]).read_bytes()
        statements = ast.parse(source).body
    except (OSError, SyntaxError, ValueError, ImportError):
        return
    for statement in statements:
        match statement:
            case ast.Import(names):
                yield from (alias.name for alias in names if _is_installed(alias.name))
            case ast.ImportFrom(str(name), _, 0) if _is_installed(name):
                yield name


def _is_installed(name: str) -> bool:
    try:
        spec = importlib.util.find_spec(name.partition(".")[0])
    except (ImportError, ValueError):
        return False
    if spec is None or spec.origin is None:
        return False
    places = (*site.getsitepackages(), site.getusersitepackages(), sysconfig.get_path("stdlib"))
    return spec.origin in ("built-in", "frozen") or spec.origin.startswith(places)


def _import(name: str) -> None:
    try:
        importlib.import_module(name)
    except Exception:
        pass  # the script will meet the same, and say so


if __name__ == "__main__":
    # In a module of its own name: `__main__` becomes the script's.
    from etc_agent.worker import spare

    spare.main()
