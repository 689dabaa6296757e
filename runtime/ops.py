"""The operators `ssd_fx::*`: the contract between the graphs and the runtime.

    begin_            counts a forward that starts
    store             starts to write a tensor, and returns its handle, which autograd saves instead of the tensor
    stand_in          returns what autograd saves instead of another tensor of the same alias group
    refuse_stand_ins  starts a backward: raises if another graph's stand-in came for a tensor that this graph keeps
    wait_store_       the release: the graph reads the stored tensor no more
    load              starts to read the tensor back; its bytes are undefined until `wait_load_` returned
    wait_load_        waits until the bytes are there

`config`: the options of the runtime, as JSON. `graph`: its name in reports. `about`: its plan, packed (`plans.py`).
`inflight`: the bytes that the plan has on their way out of memory at a time; 0 where that is not planned.
`slot`: the number of the alias group.
`seq`: the planned position of the node among our nodes in its graph.
`tier`: where the plan wants the tensor, "host", "ssd" or empty for either. `binding`: the tensor is never resident.
`later`: the write begins when the next forward does, unless the load comes first.
`stride`: the strides in which Inductor is to pass the tensor to a store; None: those of the graph.
`gone_by`: the `seq` of the node of the backward from which on the plan needs the memory; below 0 for none.
`relies_on`: one of `layout.RELIES_ON`. `donate`: the load may return the stored tensor itself.

The contract is in docs/design.md. The waits mutate an argument, so neither FX nor Inductor drops or merges them.
Inductor's Python code calls the kernels without the dispatcher, where nobody watches (`calls.py`).
"""

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from ssd_fx.compat import _get_current_graph_task_keep_graph as keeps_graph
from ssd_fx.runtime import errors, plans, trace
from ssd_fx.runtime.device import device_trace
from ssd_fx.runtime.device.device_trace import UNTIMED
from ssd_fx.runtime.device.streams import check_not_captured
from ssd_fx.runtime.entries import is_stand_in, lookup, mark, stand_in
from ssd_fx.runtime.layout import TensorMeta
from ssd_fx.runtime.memory.cpu_allocator import CPU_ALLOCATOR
from ssd_fx.runtime.states import Entry
from ssd_fx.runtime.stats import counters, step, turn
from ssd_fx.runtime.stores import forward_begins, get_store, go_on, stores

_SCHEMAS = (
    "begin_(Tensor(a!) token, str config, str graph, SymInt saved_bytes, SymInt offloaded_bytes, str about='',"
    " int inflight=0) -> ()",
    "store(Tensor x, str config, str graph, int slot, int seq, str tier='', bool binding=False, bool later=False,"
    " SymInt[]? size=None, ScalarType? dtype=None, SymInt[]? stride=None) -> Tensor",
    "stand_in(SymInt[] size, ScalarType dtype, Device device) -> Tensor",
    "refuse_stand_ins(Tensor[] saved) -> ()",
    "wait_store_(Tensor(a!) handle, Tensor keepalive, int seq, bool hand_over=False, bool block=False,"
    " int gone_by=-1) -> ()",
    "load(Tensor handle, SymInt[] size, SymInt[] stride, ScalarType dtype, Device device, int seq,"
    " bool strict=False, str relies_on='dtype', bool donate=True) -> Tensor",
    "wait_load_(Tensor(a!) x, Tensor handle, int seq) -> ()",
)


def _begin(
    token: Tensor,
    config: str,
    graph: str,
    saved_bytes: int,
    offloaded_bytes: int,
    about: str = "",
    inflight: int = 0,
) -> None:
    started = time.perf_counter()
    with device_trace.node("begin", graph, -1, -1, None):
        store = None
        if offloaded_bytes:
            check_not_captured(token.device)  # writes of earlier forwards may begin
            CPU_ALLOCATOR.forward()
            store = get_store(config)  # raises for unusable directories before anything is computed
        counters(graph).begin(saved_bytes, offloaded_bytes)
        number = step()
        forward_begins()
        if store:
            store.begin(graph, saved_bytes, token.device, number, inflight)
        if about:
            plans.note(graph, config, about)
    live, now = CPU_ALLOCATOR.live_bytes, time.perf_counter()
    trace.record(("begin", graph, -1, -1, started, now, offloaded_bytes, "none", "", live, 0.0, number))


def _store(
    x: Tensor,
    config: str,
    graph: str,
    slot: int,
    seq: int,
    tier: str = "",
    binding: bool = False,
    later: bool = False,
    size: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    stride: Sequence[int] | None = None,
) -> Tensor:
    check_not_captured(x.device)
    handle = stand_in(x.shape if size is None else size, x.dtype if dtype is None else dtype, x.device)
    found = get_store(config)
    with device_trace.node("store", graph, slot, seq, x.device) as timed:
        found.store(x, handle, graph, slot, seq, tier, binding, later, timed)
        if len(stores) > 1:
            go_on(found)
    return handle


def _stand_in(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    return mark(stand_in(size, dtype, device))


def _refuse_stand_ins(saved: Sequence[Tensor]) -> None:
    turn()
    for x in saved:
        if is_stand_in(x):
            raise errors.handle_of_another_graph(x)


def _wait_store(
    handle: Tensor, keepalive: Tensor, seq: int, hand_over: bool = False, block: bool = False, gone_by: int = -1
) -> None:
    entry = lookup(handle)
    with _timed("release", entry, seq) if entry.timed else UNTIMED:
        entry.store.wait_store_(entry, keepalive, seq, hand_over, block, gone_by)


def _load(
    handle: Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    seq: int,
    strict: bool = False,
    relies_on: str = "dtype",
    donate: bool = True,
) -> Tensor:
    entry = lookup(handle)
    if device.type != entry.device.type:
        raise errors.another_device(entry, device)
    check_not_captured(entry.device)
    CPU_ALLOCATOR.backward()
    wanted = TensorMeta(tuple(size), tuple(stride), dtype)
    with _timed("load", entry, seq) if entry.timed else UNTIMED:
        consume = donate and not keeps_graph()  # with `retain_graph` another backward may load it again
        return entry.store.load(entry, wanted, seq, consume=consume, strict=strict, relies_on=relies_on)


def _wait_load(x: Tensor, handle: Tensor, seq: int) -> None:
    entry = lookup(handle)
    with _timed("wait", entry, seq) if entry.timed else UNTIMED:
        entry.store.wait_load_(entry, x, seq)


def _timed(kind: str, entry: Entry, seq: int) -> device_trace.Node | nullcontext[int]:
    return device_trace.again(kind, entry.graph, entry.slot, seq, entry.device, entry.timed)


def _nothing(*_: object, **__: object) -> None:
    """What the fake of an operator without results does."""


def _fake_store(
    x: Tensor,
    config: str,
    graph: str,
    slot: int,
    seq: int,
    tier: str = "",
    binding: bool = False,
    later: bool = False,
    size: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    stride: Sequence[int] | None = None,
) -> Tensor:
    return _fake_stand_in(x.shape if size is None else size, x.dtype if dtype is None else dtype, x.device)


def _fake_stand_in(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty_strided(size, (0,) * len(size), dtype=dtype, device=device)


def _fake_load(
    handle: Tensor, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device, *_: object
) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


KERNELS: dict[str, Callable[..., Any]] = {
    "begin_": _begin,
    "store": _store,
    "stand_in": _stand_in,
    "refuse_stand_ins": _refuse_stand_ins,
    "wait_store_": _wait_store,
    "load": _load,
    "wait_load_": _wait_load,
}
_FAKES: dict[str, Callable[..., Any]] = {
    "store": _fake_store,
    "stand_in": _fake_stand_in,
    "load": _fake_load,
}  # the others return nothing

# flexible_layout: Inductor must pass us the buffer that it has, not a copy in another layout.
# cudagraph_unsafe: CUDA graphs are split at our nodes.
# Not every version of torch has both.
_TAGS = tuple(getattr(torch.Tag, name) for name in ("flexible_layout", "cudagraph_unsafe") if hasattr(torch.Tag, name))


def _register() -> Library:
    library = Library("ssd_fx", "DEF")
    for schema in _SCHEMAS:
        library.define(schema, tags=_TAGS)
    for name, kernel in KERNELS.items():
        library.impl(name, kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"ssd_fx::{name}", _FAKES.get(name, _nothing), lib=library)
    return library


_library = _register()
torch.fx.node.has_side_effect(torch.ops.ssd_fx.refuse_stand_ins.default)
