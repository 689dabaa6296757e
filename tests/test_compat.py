"""Private torch is imported in one place, `ssd_fx/compat`, and nothing there is of no use."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLACE = ROOT / "ssd_fx" / "compat"
ALLOWED = {  # what is read as an attribute of torch, without an import
    "torch._dynamo.config",  # settings that the documentation of torch.compile names
    "torch._dynamo.reset",  # as well
    "torch.nn.Module._call_impl",  # what Module.compile compiles
}
OPERATORS = {"inductor_prims"}  # imported for the operators that it defines


def files() -> list[Path]:
    found = {file.resolve() for name in ("ssd_fx", "passes", "runtime") for file in (ROOT / name).rglob("*.py")}
    return sorted(file for file in found if PLACE not in file.parents)


def is_private(module: str) -> bool:
    first, *rest = module.split(".")
    return first == "functorch" or (first == "torch" and any(part.startswith("_") for part in rest))


def imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def attributes(tree: ast.AST) -> Iterator[str]:
    """Attributes of torch, such as `torch._dynamo.reset`."""
    for node in ast.walk(tree):
        path, parts = node, list[str]()
        while isinstance(path, ast.Attribute):
            parts.insert(0, path.attr)
            path = path.value
        if parts and isinstance(path, ast.Name) and path.id == "torch":
            yield ".".join(["torch", *parts])


def test_no_other_file_imports_private_torch() -> None:
    found = {(file.name, name) for file in files() for name in imports(ast.parse(file.read_text())) if is_private(name)}
    assert found == set()


def test_no_other_file_reads_private_attributes_of_torch() -> None:
    found = {
        (file.name, name)
        for file in files()
        for name in attributes(ast.parse(file.read_text()))
        if is_private(name) and not name.startswith(("torch.ops.", "torch.__", "torch.optim.Optimizer.__init__"))
    }
    assert {each for each in found if not any(f"{known}.".startswith(f"{each[1]}.") for known in ALLOWED)} == set()


def test_all_that_is_there_is_used() -> None:
    used = {name for file in files() for name in imports(ast.parse(file.read_text())) if ".compat." in name}
    for file, module in ((PLACE / "__init__.py", "ssd_fx.compat"), (PLACE / "inductor.py", "ssd_fx.compat.inductor")):
        tree = ast.parse(file.read_text())
        imported = [node for node in tree.body if isinstance(node, ast.ImportFrom) and is_private(node.module or "")]
        names = {alias.asname or alias.name for node in imported for alias in node.names}
        own = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        assert {name for name in names - own if f"{module}.{name}" not in used} == {*OPERATORS} & names, module
