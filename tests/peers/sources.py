"""Finds PyTorch's own test files in directories that the user has, and makes them ready to run.

Two layouts are known: a checkout of pytorch (test/functorch/test_aotdispatch.py), and of its XPU fork's tests, which
fall back to the CPU (test/xpu/functorch/test_aotdispatch_xpu.py). Nothing of either is part of this repository.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

HOW_TO_GET = """\
PyTorch's tests are not in its wheel. Get those of the installed version with

    git clone --depth 1 --branch v{version} --filter=blob:none --sparse https://github.com/pytorch/pytorch DIR
    git -C DIR sparse-checkout set test/functorch test/dynamo test/higher_order_ops

and name DIR with --tests DIR (make peers TESTS=DIR)."""


@dataclass(frozen=True)
class Suite:
    """A test file: its folder under test/, and its name."""

    folder: str
    name: str

    def find(self, roots: Sequence[Path]) -> Path | None:
        """The file, in the first directory that has it."""
        places = (f"test/{self.folder}/{self.name}.py", f"test/xpu/{self.folder}/{self.name}_xpu.py")
        return next((root / place for root in roots for place in places if (root / place).is_file()), None)


SUITES = (
    Suite("functorch", "test_aotdispatch"),
    Suite("functorch", "test_aot_joint_with_descriptors"),
    Suite("functorch", "test_memory_efficient_fusion"),
    Suite("functorch", "test_ac"),
    Suite("functorch", "test_ac_knapsack"),
    Suite("functorch", "test_ac_logging"),
    Suite("dynamo", "test_activation_checkpointing"),
    Suite("dynamo", "test_aot_autograd"),
    Suite("dynamo", "test_aot_autograd_cache"),
    Suite("dynamo", "test_regional_inductor"),
    Suite("dynamo", "test_wrap_inductor_compiled_regions"),
    Suite("higher_order_ops", "test_invoke_subgraph"),
    Suite("higher_order_ops", "test_with_effects"),
)


def how_to_get() -> str:
    """What a user with a network does."""
    return HOW_TO_GET.format(version=torch.__version__.partition("+")[0])


def prepare(suite: Suite, roots: Sequence[Path], work: Path) -> Path | None:
    """The file to run; of a fork a copy in `work` that says "cpu" where the fork says "xpu". None: nobody has it."""
    found = suite.find(roots)
    if found is None or not found.stem.endswith("_xpu"):
        return found
    copy = work / "sources" / found.name  # its tests look for their own file's name in stack traces
    copy.parent.mkdir(parents=True, exist_ok=True)
    text = found.read_text().replace('"xpu"', '"cpu"').replace('"xpu:0"', '"cpu"')
    copy.write_text(text.replace('["cpu", "cpu"]', '["cpu"]'))
    return copy


def import_paths(roots: Sequence[Path]) -> list[Path]:
    """Directories that the tests import each other's helpers from."""
    return [path for root in roots for path in (root / "test", root / "test/functorch") if path.is_dir()]
