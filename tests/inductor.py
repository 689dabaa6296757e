"""Inductor, with less of the C++ compiler, which takes most of a test's time."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch._inductor.config as config
from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import CppPythonBindingsCodeCache, FxGraphCache


@contextlib.contextmanager
def kernels_on_demand() -> Iterator[None]:
    """A C++ kernel is compiled when it is called: many tests look at plans and code, and run only some of it."""
    with mock.patch.object(AsyncCompile, "cpp_pybinding", lambda _, types, source: _on_demand(types, source)):
        yield


def _on_demand(types: Sequence[str], source: str) -> Callable[..., Any]:
    built: list[Callable[..., Any]] = []

    def call(*args: Any) -> Any:
        if not built:
            built.append(CppPythonBindingsCodeCache.load_pybinding(list(types), source))
        return built[0](*args)

    return call


@contextlib.contextmanager
def graphs_cached_in(directory: Path) -> Iterator[None]:
    """The caches of compiled graphs are those of `directory`, at first empty; kernels are found again."""
    with (
        mock.patch.object(FxGraphCache, "_get_tmp_dir", return_value=str(directory / "fxgraph")),
        mock.patch.object(AOTAutogradCache, "_get_tmp_dir", return_value=str(directory / "aotautograd")),
    ):
        yield


def start_at_once() -> None:
    """An empty cache otherwise begins with half a minute of trying what the compiler can do, and with workers that
    import torch. For processes that the tests start too."""
    os.environ |= {"TORCHINDUCTOR_VEC_ISA_OK": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    config.cpp.vec_isa_ok, config.compile_threads = True, 1
