"""The views of the options: the passes and the runtime read nothing that theirs leave out."""

from __future__ import annotations

import ast
from dataclasses import fields
from pathlib import Path

import pytest

from ssd_fx import Config
from ssd_fx.options import PLAN, RUNTIME, Options, noted
from ssd_fx.runtime.config import parse

ROOT = Path(__file__).resolve().parent.parent
PROPERTIES = {  # what is computed of options, and of which
    "resident": {"budget"},
    "resident_at_most": {"budget"},
    "inflight_bytes": {"inflight"},
    "copies_only": {"engine"},
}


def read_in(folder: str, name: str) -> set[str]:
    """The options that the code in `folder` reads of what it calls `name`."""
    found = set()
    for file in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == name:
                found |= PROPERTIES.get(node.attr, {node.attr})
    return found & {f.name for f in fields(Options)}


@pytest.mark.parametrize(("folder", "name", "reader"), [("passes", "options", PLAN), ("runtime", "config", RUNTIME)])
def test_a_view_has_exactly_what_its_reader_reads(folder: str, name: str, reader: str) -> None:
    """What a view leaves out has its default there, so a reader would obey nobody."""
    assert read_in(folder, name) == {option for option, notes in noted().items() if reader in notes}


def test_the_runtime_gets_what_was_said() -> None:
    said = {"dirs": ["/a"], "memory": "1GiB", "compression": {"ssd": "fp8"}, "inflight": "1MiB", "adapt": False}
    config = Config.make(said | {"engine": "memory", "host_budget": 7, "prefetch": 0, "min_bytes": 3})
    found = parse(config.runtime_json())
    assert {f.name: getattr(found, f.name) for f in fields(Options)} == {
        name: getattr(config if RUNTIME in notes else Options(), name) for name, notes in noted().items()
    }


def test_every_option_is_described() -> None:
    assert Config.__doc__ == Options.__doc__
    for name in noted():
        assert f"\n    {name} (" in (Config.__doc__ or ""), name
