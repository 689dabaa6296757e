"""Inputs beside tensor subclasses: hidden states leave memory, and parts of a subclass that the caller passes stay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._functorch._aot_autograd.descriptors import (
    AOTInput,
    ForwardTokenAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    SubclassGetAttrAOTInput,
    SyntheticBaseAOTInput,
    TangentAOTInput,
)
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map

import ssd_fx
from ssd_fx.passes.joint.recompute import Joint
from ssd_fx.passes.partition import activation_names
from tests.bitwise import Compile, assert_same_bits, ours, prove_bitwise, run
from tests.passes import toys

TOY: dict[str, Any] = {"inner": "aot_eager", "min_bytes": 0, "machine": "default", "recompute": False}


class Int8Weight(torch.Tensor):
    """int8 values with a scale per row, as of a frozen weight; any operator sees the float32 product of both."""

    @staticmethod
    def __new__(cls, values: torch.Tensor, scale: torch.Tensor) -> Int8Weight:
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=scale.dtype)  # type: ignore[attr-defined, no-any-return]

    def __init__(self, values: torch.Tensor, scale: torch.Tensor) -> None:
        self.values_, self.scale_ = values, scale

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return "Int8Weight()"  # logs show it while it is fake

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["values_", "scale_"], None

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, torch.Tensor], *_: object) -> Int8Weight:
        return cls(parts["values_"], parts["scale_"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return return_and_correct_aliasing(func, args, kwargs or {}, cls(args[0].values_, args[0].scale_))

        def plain(x: Any) -> Any:
            return x.values_.to(x.scale_.dtype) * x.scale_ if isinstance(x, cls) else x

        return func(*tree_map(plain, args), **tree_map(plain, kwargs or {}))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)
        weight = self.down.weight.detach()
        scale = weight.abs().amax(1, keepdim=True) / 127
        frozen = Int8Weight((weight / scale).round().to(torch.int8), scale)
        self.down.weight = nn.Parameter(frozen, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))  # type: ignore[no-any-return]


def gradients(compile: Compile) -> list[torch.Tensor]:
    blocks = nn.Sequential(*(Block() for _ in range(3)))
    for block in blocks:
        block.compile(**compile.keywords)  # type: ignore[attr-defined]
    for _ in range(2):
        x = torch.randn(32, 16) * 1
        blocks(x).square().mean().backward()
    return [p.grad for p in blocks.parameters() if p.grad is not None]


@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_hidden_states_of_blocks_with_a_quantized_weight_leave(inner: str) -> None:
    options = TOY | {"inner": inner, "engine": "memory", "budget": 0}
    prove_bitwise(gradients, [ours(options, budget=1.0), ours(options)])
    rows = [row for g in ssd_fx.report().graphs for row in g.rows if row.shared == "input"]
    assert rows
    assert {row.decision for row in rows} == {"offload"}
    assert not any("weight" in row.source for g in ssd_fx.report().graphs for row in g.rows)


def test_parts_of_a_subclass_that_the_caller_passes_stay_and_are_named() -> None:
    w = torch.randn(8, 8, requires_grad=True)

    def product(x: torch.Tensor) -> torch.Tensor:
        return x @ w

    pair = TwoTensor(torch.randn(8, 8), torch.randn(8, 8))
    found = ssd_fx.explain(product, options=TOY | {"engine": "memory"})(pair)
    reasons = [row["reason"] for row in found.rows() if row["shared"] == "input"]
    assert reasons == ["part of a tensor subclass that the caller passes"] * 2


def ragged(rows: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.relu(nn.functional.linear(torch.tanh(rows), w))


def jagged(lengths: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(n, 16, generator=generator) for n in lengths]
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


def test_a_jagged_tensor_that_is_passed_stays_and_its_parts_leave() -> None:
    """The advice of the warning can be followed, and the gradients are the same."""

    def built(values: torch.Tensor, offsets: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return ragged(torch.nested.nested_tensor_from_jagged(values, offsets), w).values()

    def gradient(function: Callable[..., torch.Tensor], compile: Compile) -> list[torch.Tensor]:
        compiled = compile(function)
        w = torch.randn(16, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()
        for rows in map(jagged, ((2, 5, 3), (4, 1, 2))):
            result = compiled(rows, w) if function is ragged else compiled(rows.values(), rows.offsets(), w)
            (result.values() if function is ragged else result).sin().sum().backward()
        assert w.grad is not None
        return [w.grad]

    how = ours(TOY, engine="memory", budget=0, spare=False)
    with pytest.warns(RuntimeWarning, match="builds the tensor itself"):
        passed = run(partial(gradient, ragged), how)
    assert ssd_fx.stats().offloaded_bytes == 0
    assert_same_bits(run(partial(gradient, built), how), passed)
    assert ssd_fx.stats().offloaded_bytes > 0


def test_inputs_of_which_nothing_is_known_are_the_caller_s() -> None:
    partition = replace(toys.partitioned(toys.relu_chain), activations=None)
    assert [n.name for n in partition.caller_inputs] == ["primals_1", "primals_2"]


def test_inputs_are_traced_back_to_the_arguments() -> None:
    """One of an unknown kind makes all unknown."""
    parts = [SubclassGetAttrAOTInput(PlainAOTInput(2), "values_"), SubclassGetAttrAOTInput(PlainAOTInput(3), "a")]
    tangent = SubclassGetAttrAOTInput(TangentAOTInput(PlainAOTOutput(0)), "a")

    def found(*more: AOTInput, lasting: frozenset[int] | None = frozenset({0, 2})) -> frozenset[str] | None:
        graph = fx.Graph()
        for i, desc in enumerate((ForwardTokenAOTInput(0), PlainAOTInput(0), PlainAOTInput(1), *parts, tangent, *more)):
            graph.placeholder(f"p{i}").meta["desc"] = desc
        graph.output(())
        return activation_names(fx.GraphModule({}, graph), [0, 2], lasting)

    assert found() == {"p2", "p4"}
    assert found(lasting=None) is None
    assert found(SyntheticBaseAOTInput(PlainAOTInput(1))) is None


def test_a_copy_of_the_joint_graph_knows_its_inputs_too() -> None:
    """A rival is cut from a copy."""
    graph = fx.Graph()
    for i, desc in enumerate((SubclassGetAttrAOTInput(PlainAOTInput(0), "values_"), PlainAOTInput(1))):
        graph.placeholder(f"p{i}").meta["desc"] = desc
    graph.output(())
    joint = Joint(fx.GraphModule({}, graph), [], {}, (), frozenset({0}))
    assert joint.copy()._activations == joint._activations == {"p1"}
