"""A random caller under the stock compiler and under ours, where each value comes from every source; compared bitwise.

static, dynamic     all programs of a process share the compiled code of each block, which depends on nothing else
own, automatic      each run has code of its own: what is compiled depends on what the run did before
"""

from __future__ import annotations

import functools
import gc
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch._functorch import config as functorch_config

import ssd_fx
from ssd_fx.runtime.entries import living
from ssd_fx.runtime.stores import close_stores
from tests.callers.blocks import BLOCKS, copy_of
from tests.callers.caller import Blocks, Call, Caller, Outcome
from tests.callers.compare import IN_PLACE, Comparison, Difference, Verdict
from tests.callers.programs import Program
from tests.passes.recomputing import SLOW, everything_recomputed
from tests.sources import OPTIONS, SOURCES, Source

Function = Callable[[Caller], None]
DYNAMIC = {"static": False, "dynamic": True, "own": False, "automatic": None}


@dataclass(frozen=True)
class Compiler:
    """`kind`: "eager", "stock", "ours", "kept", which is ours with everything in memory, "limited", which is ours
    under a limit of memory, or "again", which computes again what it can; `inner`: as the option."""

    kind: str
    inner: str = "aot_eager"

    def compile(self, module: nn.Module, mode: str) -> Call:
        if self.kind == "eager":
            return module
        given: dict[str, Any] = {"dynamic": DYNAMIC[mode]}
        if self.kind == "stock":
            return torch.compile(module, backend=self.inner, **given)
        options = OPTIONS | {"inner": self.inner} | ({"budget": 1.0} if self.kind == "kept" else {})
        if self.kind == "limited":
            options = {name: value for name, value in options.items() if name != "budget"} | {"memory": "1TiB"}
        if self.kind == "again":
            options |= {"recompute": True, "machine": SLOW}
        return torch.compile(module, backend=ssd_fx.backend, options=options, **given)

    def blocks(self, mode: str) -> Blocks:
        """Fresh code, or what all programs of this mode share."""
        known = _shared.setdefault((self, mode), {}) if mode in SHARED else {}

        def block(name: str) -> tuple[type[nn.Module], Callable[[nn.Module], Call]]:
            kind = known.setdefault(name, copy_of(BLOCKS[name]) if self.kind != "eager" else BLOCKS[name])
            return kind, functools.partial(self.compile, mode=mode)

        return block


SHARED = ("static", "dynamic")
_shared: dict[tuple[Compiler, str], dict[str, type[nn.Module]]] = {}
EAGER, STOCK, OURS = Compiler("eager"), Compiler("stock"), Compiler("ours")
LIMITED, AGAIN = Compiler("limited"), Compiler("again")


@dataclass(frozen=True)
class Run:
    """Of every line of a program; `leaks`: whether something that it made lives still."""

    outcomes: list[Outcome]
    leaks: bool


def run_once(program: Function, mode: str, precision: str, compiler: Compiler) -> Run:
    caller = Caller(compiler.blocks(mode), precision)
    torch.manual_seed(0)
    # Whether a backward may keep its graph depends, with donated buffers, on the first backward of its code: of shared
    # code that may have been another program's.
    with functorch_config.patch(donated_buffer=mode not in SHARED):
        program(caller)
    outcomes, made = caller.outcomes, [weakref.ref(x) for x in (caller, *caller.made)]
    del caller
    for pause_s in (0.0, 0.0, 0.05, 0.2, 1.0):  # a thread that ends drops what it holds a little later
        if all(ref() is None for ref in made):
            return Run(outcomes, leaks=False)
        gc.collect()
        time.sleep(pause_s)
    return Run(outcomes, any(ref() is not None for ref in made))


def run_ours(program: Function, mode: str, precision: str, compiler: Compiler, source: Source) -> tuple[Run, list[str]]:
    """Where every value comes from `source`; and what is stored still, though nobody has a graph any more."""
    close_stores()
    with source.forced(), everything_recomputed() if compiler.kind == "again" else nullcontext():
        found = run_once(program, mode, precision, compiler)
        return found, [entry.name for entry in living()]


def judge(
    program: Function,
    mode: str,
    precision: str,
    sources: Sequence[str] = tuple(SOURCES),
    inner: str = "aot_eager",
    ours: Compiler = OURS,
) -> Verdict:
    """Under stock, then under ours from all sources; the reference of Inductor is our partition with all kept, for
    other graphs fuse, and round, otherwise."""
    reference = STOCK if inner == "aot_eager" else Compiler("kept", inner)
    ours = replace(ours, inner=inner)
    stock = run_once(program, mode, precision, reference)
    verdict = Verdict(stock.outcomes)
    eager = functools.cache(lambda: run_once(program, mode, precision, EAGER).outcomes)
    leaks = functools.cache(lambda: stock.leaks or run_once(program, mode, precision, reference).leaks)  # some: later
    for name in sources:
        if name == "put_aside" and any(o.hooked or IN_PLACE in o.kind for o in stock.outcomes):
            continue  # behind a release that hands nothing over the memory is its owner's to change
        got, stored = run_ours(program, mode, precision, ours, SOURCES[name])
        if (got.leaks or stored) and not leaks():
            verdict.differences.append(Difference(name, -1, f"a graph lives still, and has stored {stored}"))
        Comparison(name, eager, precision).add_to(verdict, got.outcomes)
    return verdict


def run(program: Program, sources: Sequence[str] = tuple(SOURCES), inner: str = "aot_eager") -> Verdict:
    return judge(program.function(), program.mode, program.precision, sources, inner)


@contextmanager
def many_compiled() -> Iterator[None]:
    """Dynamo keeps as many variants of a block as programs need."""
    with torch._dynamo.config.patch(recompile_limit=10_000, accumulated_recompile_limit=10_000):
        yield


def main(program: Function, mode: str, precision: str, inner: str = "aot_eager") -> None:
    """Prints how every line ends under stock, and what differs under ours."""
    with many_compiled():
        found = judge(program, mode, precision, inner=inner)
    for outcome in found.stock:
        print(f"line {outcome.line}: {outcome.kind or 'no error'}")
    for reason, count in found.excused.items():
        print(f"{count} lines otherwise: {reason}")
    for different in found.differences:
        print(f"DIFFERS  {different}")
    close_stores()
