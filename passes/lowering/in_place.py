"""Lets Inductor's kernels write in place over loaded tensors.

    buf2 = load(...)
    wait_load_(buf2)            it writes into buf2, so Inductor calls that buf3 from here on
    kernel(buf3, dy)            reads buf3 last. Inductor writes over no buffer that another node wrote into

    kernel(buf2, dy)            so its readers read buf2 again, and each has an order to run behind the wait

A loaded tensor belongs to the graph alone: it was donated, or it is a copy, or memory that was read into
(`runtime/reader.py`). Without this it would live until its last reader has made another tensor of its size.

Inductor decides when it writes the code (`decide_inplace_update`, torch 2.13): a kernel may write over a buffer if all
other users of the buffer have run, and the wait is one of them. So nothing is overwritten before its bytes are there.
The audit looks at what came of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from ssd_fx.compat.inductor import BaseSchedulerNode, Dep, OrderedSet, WeakDep


def may_overwrite_loaded(nodes: Sequence[BaseSchedulerNode], waits: Iterable[BaseSchedulerNode]) -> None:
    """Let the readers of loaded tensors write over them. Runs after fusion, and before the order is chosen.

    A tensor stays as Inductor has it if something else writes into it too, or if another buffer is a view of it.
    """
    for wait in waits:
        for written in wait.get_outputs():
            for loaded in written.get_mutations():
                if _only_the_wait_writes(wait.scheduler, loaded, written.get_name()):
                    _read_the_buffer_itself(nodes, wait.scheduler, loaded, written.get_name())


def _only_the_wait_writes(scheduler: Any, loaded: str, written: str) -> bool:
    """Whether nothing else writes into a loaded buffer, and no other buffer is a view of it.

    `written`: what the buffer is called behind the wait.
    """
    writes = [name for name, real in scheduler.mutation_real_name.items() if real == loaded]
    views = (b for b in scheduler.name_to_buf.values() if {loaded, written} & set(b.get_aliases()))
    return loaded in scheduler.name_to_buf and writes == [written] and not any(views)


def _read_the_buffer_itself(nodes: Sequence[BaseSchedulerNode], scheduler: Any, loaded: str, written: str) -> None:
    """Have the readers of `written` read `loaded`, which is the same memory, and run behind the wait."""
    behind_the_wait = WeakDep(written, mutating_buf=loaded, is_fake=True)

    def renamed(dependencies: Iterable[Dep]) -> OrderedSet[Dep]:
        new = (d.rename({written: loaded}) if _is_read(d, written) else d for d in dependencies)
        return OrderedSet([*new, behind_the_wait])

    for kernel in nodes:
        for part in {id(each): each for each in (*kernel.get_nodes(), kernel)}.values():
            if any(_is_read(d, written) for d in part.read_writes.reads):
                unmet = renamed(part.unmet_dependencies)
                if hasattr(part, "mutation_renames"):  # a fused kernel has none
                    part.mutation_renames = {old: new for old, new in part.mutation_renames.items() if new != written}
                part.set_read_writes(replace(part.read_writes, reads=renamed(part.read_writes.reads)))
                part.unmet_dependencies = unmet  # without what the parts of a fused kernel make for each other
    made = scheduler.name_to_buf[loaded]
    made.set_users([*made.users, *scheduler.name_to_buf[written].users])


def _is_read(dependency: Dep, name: str) -> bool:
    return dependency.name == name and not isinstance(dependency, WeakDep)
