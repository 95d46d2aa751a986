"""PyTorch's private names are used in one package alone, are listed there, and exist in the installed PyTorch."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "etc_agent" / "torch_private"
MODULES = sorted(path.stem for path in PACKAGE.glob("*.py") if path.stem != "__init__")
OTHERS = [
    path for room in ("etc_agent", "launcher") for path in sorted((ROOT / room).rglob("*.py"))
    if path.parent not in (PACKAGE, ROOT / "etc_agent" / "adapters" / "megatron")
]
HUGGING_FACE = [ROOT / "etc_agent" / name for name in (
    "adapters/accelerate.py", "adapters/transformers.py", "hugging_face/trainer.py",
)]
"""Their private names are Hugging Face's; each lists them in NAMES, and tests/stacks checks that they exist."""
NOT_OF_TORCH = {"_actions"}
"""argparse's."""
PATH_OF_TORCH = re.compile(r"torch(\.\w+)*")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def has_private_part(path: str) -> bool:
    return any(is_private(part) for part in path.split("."))


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def names_of_our_own() -> set[str]:
    """Whatever the tree defines: functions, classes, variables and attributes of `self`."""
    found = set()
    for path in OTHERS:
        for node in ast.walk(parsed(path)):
            match node:
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                    found.add(name)
                case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name) | ast.Name(id=name, ctx=ast.Store()):
                    found.add(name)
    return found


def root_of(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def private_names(tree: ast.Module, own: set[str]) -> Iterator[str]:
    """The private names in a file that are neither its project's nor the standard library's."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names if alias.name.startswith("torch"))
            case ast.ImportFrom(module=str(module), names=names) if module.startswith("torch"):
                yield module
                yield from (alias.name for alias in names)
            case ast.Attribute(attr=name) if name not in own and root_of(node) not in sys.stdlib_module_names:
                yield name
            case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[_, ast.Constant(value=str(name)), *_]):
                yield name
            case ast.Constant(value=str(text)) if PATH_OF_TORCH.fullmatch(text):
                yield text


@pytest.mark.parametrize(
    "path", [path for path in OTHERS if path not in HUGGING_FACE], ids=lambda path: str(path.relative_to(ROOT))
)
def test_no_file_outside_the_package_uses_a_private_name_of_torch(path: Path) -> None:
    used = {name for name in private_names(parsed(path), OWN | NOT_OF_TORCH) if has_private_part(name)}
    assert not used, f"{', '.join(sorted(used))}: wrap it in a module of etc_agent/torch_private"


OWN = names_of_our_own()


@pytest.mark.parametrize("name", MODULES)
def test_a_module_of_the_package_lists_the_private_names_that_it_uses(name: str) -> None:
    tree = parsed(PACKAGE / f"{name}.py")
    listed = importlib.import_module(f"etc_agent.torch_private.{name}").NAMES
    defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    parts = {part for used in private_names(tree, defined) for part in used.split(".") if is_private(part)}
    assert parts == {part for path in listed for part in path.split(".") if is_private(part)}


@pytest.mark.parametrize("name", MODULES)
def test_every_listed_name_exists_in_the_installed_torch(name: str) -> None:
    for path in importlib.import_module(f"etc_agent.torch_private.{name}").NAMES:
        assert exists(path), f"{path} is gone; etc_agent/torch_private/{name}.py has to find another way"


def exists(path: str) -> bool:
    parts = path.split(".")
    for split in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:split]))
        except ImportError:
            continue
        try:
            for part in parts[split:]:
                found = getattr(found, part)
        except AttributeError:
            return has_instance_attribute(found, parts[-1])
        return True
    return False


def has_instance_attribute(kind: object, name: str) -> bool:
    """Whether `kind` is a class whose instances are given the attribute `name` in its own code."""
    if not isinstance(kind, type):
        return False
    source = Path(sys.modules[kind.__module__].__file__ or "").read_text()
    return f"self.{name} " in source or f"self.{name}:" in source
