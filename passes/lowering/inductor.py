"""Inductor's lowerings of our nodes. The lowering of the release drops the stored buffer.

    FX graph          handle = store(relu); ...; wait_store_(handle, relu, 7, True)
    generated code    handle = ssd_fx_ops.store(buf4, ...)                            # runtime/calls.py
                      ...
                      ssd_fx_ops.wait_store_(handle, buf4, 7, True)                   # True: it hands the buffer over
                      del buf4

Inductor frees a buffer or reuses its memory after the last use, although a write may still read from there. So the
lowering of `wait_store_` emits the `del` itself, right after the call, and takes the buffer out of reuse. The release
should always be the last use. If it is not, it hands nothing over and blocks until the write is done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

import ssd_fx.runtime.ops  # noqa: F401  (defines torch.ops.ssd_fx)
from ssd_fx.compat import OpOverload, tree_map_only
from ssd_fx.compat import inductor_config as config
from ssd_fx.compat.inductor import V, ir, lowering, register_lowering
from ssd_fx.compat.inductor import has_saved_lowp_output_use as _SAVED_AND_READ
from ssd_fx.passes.lowering import audit, random_numbers, sums
from ssd_fx.passes.lowering.order import PinOrder, called
from ssd_fx.passes.partition import RECOMPUTED, STORED, calls_ours

ops = torch.ops.ssd_fx
CALLS = "ssd_fx_ops"  # the name of `runtime/calls.py` in generated code


class AuditedKernel(ir.FallbackKernel):
    """A call of one of our operators. The code that contains it is audited when it is written out."""

    def codegen(self, wrapper: Any) -> None:
        audit.attach(wrapper)
        if not V.graph.cpp_wrapper:
            wrapper.add_import_once(f"from ssd_fx.runtime import calls as {CALLS}")
        super().codegen(wrapper)

    def get_kernel_name(self) -> str:
        """What the generated code calls."""
        return str(super().get_kernel_name()) if V.graph.cpp_wrapper else f"{CALLS}.{called(self)}"


class StoreKernel(AuditedKernel):
    """`store`; `stored` is the realized input, which the release drops."""

    stored: Any


class RefusingKernel(AuditedKernel):
    """`refuse_stand_ins`, which yields nothing and changes nothing, but must not be removed."""

    def has_side_effects(self) -> bool:
        return True


class ReleaseKernel(AuditedKernel):
    """`wait_store_`: drops its buffer after the call if nothing uses it later."""

    def codegen(self, wrapper: Any) -> None:
        name = _input_name(self, 1)
        current = V.graph.scheduler.current_node
        assert current is not None
        last = name in current.last_usage and not V.graph.cpp_wrapper
        if not last:
            schema = ops.wait_store_.default._schema
            self.constant_args = with_constant(schema, self.constant_args, "hand_over", False)
        super().codegen(wrapper)
        if last:
            wrapper.freed.add(name)
            wrapper.writeline(f"del {name}")


def _lower_store(x: Any, *args: Any) -> Any:
    # The load asks for these strides, and the members of the group are rebuilt from them, so Inductor may not choose
    # others.
    base = V.graph.current_node.args[0]
    assert isinstance(base, torch.fx.Node)
    given = dict(zip((a.name for a in ops.store.default._schema.arguments[1:]), args, strict=False))
    stride = given.get("stride") or base.meta["val"].stride()
    x.realize()  # otherwise Inductor requires the strides of a copy, and other readers of `x` compute it once more
    x = ir.ExternKernel.realize_input(ir.ExternKernel.require_exact_strides(x, stride))
    if _is_in_memory_of_another(x, base):
        x = ir.ExternKernel.require_exact_strides(ir.ExternKernel.copy_input(x), stride)
    handle = StoreKernel.create(ops.store.default, x, *args)
    _store_of(handle).stored = x
    return tree_map_only(ir.IRNode, ir.TensorBox.create, handle)


def _is_in_memory_of_another(x: Any, node: torch.fx.Node) -> bool:
    """Whether a realized tensor, the result of `node`, is a part of an input or output, or of a buffer that may be one.

    Hazard: the generated code makes a new tensor of that memory, with a version counter of its own. Nobody notices when
    the caller writes into the whole. The partition's storages do not show it. A `cat` has its inputs computed into its
    result. Passes behind the partitioner take copies out, or write into an input instead of a copy.
    """
    name, is_part = x.get_name(), isinstance(x, ir.ReinterpretView)
    if name in V.graph.graph_inputs:
        return is_part
    if is_part and _viewed(node) in map(_viewed, node.graph.output_node().all_input_nodes):
        return True
    return isinstance(V.graph.get_buffer(name).get_layout(), ir.NonOwningLayout)


def _viewed(node: torch.fx.Node) -> torch.fx.Node:
    """The node that a chain of views begins with, by the operators. Passes leave `meta` behind that is wrong here."""
    while isinstance(node.target, OpOverload) and node.target.is_view:
        node = node.all_input_nodes[0]
    return node


def _lower_load(handle: Any, *args: Any) -> Any:
    if not isinstance(config._post_fusion_custom_pass, PinOrder):
        raise RuntimeError(
            "the backward of a model compiled with ssd_fx was traced into a graph that another backend compiles; "
            "name ssd_fx as the backend of compiled autograd too, or turn torch._dynamo.config.compiled_autograd off"
        )
    arguments = ops.load.default._schema.arguments[1:]
    given = dict(zip((a.name for a in arguments), args, strict=False)) | {"relies_on": "address"}
    made = AuditedKernel.create(ops.load.default, handle, *(given.get(a.name, a.default_value) for a in arguments))
    return tree_map_only(ir.IRNode, ir.TensorBox.create, made)


def _lower_refuse_stand_ins(saved: Any) -> None:
    RefusingKernel.create(ops.refuse_stand_ins.default, saved)


def with_constant(schema: Any, constants: Sequence[Any], name: str, value: Any) -> tuple[Any, ...]:
    """`constants` with the one called `name` replaced. They are the arguments of an operator that are no tensors."""
    names = [a.name for a in schema.arguments if not isinstance(a.type, torch.TensorType)]
    assert len(names) == len(constants), f"{schema.name} takes {names}; its kernel has {list(constants)}"
    return tuple(value if n == name else c for n, c in zip(names, constants, strict=True))


def _lower_release(handle: Any, keepalive: Any, *args: Any) -> None:
    # The release must hold the very buffer that was stored. To realize `keepalive` once more could make a copy, and the
    # release would hold that.
    store = _store_of(V.graph.name_to_buffer[handle.get_name()])
    given = 2 + len(args)
    defaults = [a.default_value for a in ops.wait_store_.default._schema.arguments[given:]]
    ReleaseKernel.create(ops.wait_store_.default, handle, store.stored, *args, *defaults)
    release = V.graph.operations[-1]
    assert isinstance(release, ReleaseKernel)
    held = _input_name(release, 1)
    written = _input_name(store, 0)
    assert held == written, f"Inductor would protect {held} but stores {written}"


def _input_name(kernel: ir.FallbackKernel, index: int) -> str:
    buffer = kernel.inputs[index]
    assert isinstance(buffer, ir.IRNode)
    return buffer.get_name()


def _store_of(handle: Any) -> StoreKernel:
    """The kernel that makes a handle. The handle is that kernel, or an item of what it returns."""
    node = handle if isinstance(handle, StoreKernel) else handle.inputs[0]
    assert isinstance(node, StoreKernel), f"{handle.get_name()} is no handle of a store"
    return node


def _is_saved_and_read(node: torch.fx.Node | None) -> bool:
    """Whether an operator's result is saved for the backward, and read in the forward too.

    Inductor rounds such a result to its dtype, bfloat16 or float16, before the forward goes on with it. It looks for
    the node among the outputs of the graph, where our graph has a handle. Without this a GPU's forward would compute
    with other bits than the same graph without offloading. A node that a later pass of Inductor puts in the place of a
    saved one is not known here.

    A tensor that is computed again is rounded in both graphs. Hazard: a saved tensor may be made of it, such as its
    maximum. If only one graph rounded, the maximum would equal no element of the tensor.
    """
    if node is not None and RECOMPUTED in node.meta:
        return True
    if _SAVED_AND_READ is not None and _SAVED_AND_READ(node):
        return True
    if node is None or STORED not in node.meta:
        return False
    return any(user.op != "output" and not calls_ours(user) for user in node.users)


def _lower_as_is(operator: OpOverload, *args: Any) -> Any:
    return tree_map_only(ir.IRNode, ir.TensorBox.create, AuditedKernel.create(operator, *args))


_AS_IS = (ops.begin_.default, ops.stand_in.default, ops.wait_load_.default)
LOWERINGS: dict[OpOverload, Callable[..., Any]] = {
    **{operator: partial(_lower_as_is, operator) for operator in _AS_IS},
    ops.store.default: _lower_store,
    ops.load.default: _lower_load,
    ops.wait_store_.default: _lower_release,
    ops.refuse_stand_ins.default: _lower_refuse_stand_ins,
}


def register() -> None:
    """Make the lowerings known to Inductor; calling it again changes nothing."""
    random_numbers.register()
    sums.register()
    if _SAVED_AND_READ is not None:
        lowering._has_saved_lowp_output_use = _is_saved_and_read
    for operator, lower in LOWERINGS.items():
        register_lowering(operator, type_promotion_kind=None)(lower)
