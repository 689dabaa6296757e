"""Marks and patterns through `torch.compile`: what the user writes, what happens, and what it does not change."""

from __future__ import annotations

import functools
import json
import logging
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code
from torch.utils.checkpoint import CheckpointPolicy

import ssd_fx
from tests.bitwise import assert_same_bits
from tests.inductor import graphs_cached_in
from tests.models import Named, NamedBlock
from tests.passes import toys

INNERS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]


@pytest.fixture
def options(tmp_path: Path) -> dict[str, object]:
    return {"dirs": [str(tmp_path)], "min_bytes": 0}


def inputs(size: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(size, size, generator=generator).requires_grad_() for _ in range(2))  # type: ignore[return-value]


def gradients(function: Callable[..., torch.Tensor], *args: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(function(*args), args)


def plan_text(directory: Path) -> str:
    (path,) = directory.glob("*.plan.txt")
    return path.read_text().partition("\n#")[0]  # without the legend


Mark = Callable[[torch.Tensor], torch.Tensor]


def layers(mark: Mark) -> Callable[..., torch.Tensor]:
    """Three matmuls; what the second reads, saved by any partition, is marked."""

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = mark(mark(x @ w) @ w)
        return ((y @ w).sin() @ w).sum()

    return function


def attention(mark: Mark) -> Callable[..., torch.Tensor]:
    """Softmax attention, which Inductor fuses if nothing is in between; everything in between is marked."""

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        q, k, v = (mark(t.view(2, 8, 16, 16)) for t in (x @ w, x @ w.t(), x + w))
        scores = mark(mark(q @ k.transpose(-2, -1)) / 4.0)
        return mark(mark(scores.softmax(-1)) @ v).sin().sum()

    return function


def written(mark: Mark) -> Callable[..., torch.Tensor]:
    """Marked tensors are written in place, and the result is returned."""

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = mark(x @ w)
        y.relu_()
        return mark(mark(y @ w).add_(1).sin_() * y).sum()

    return function


def none(x: torch.Tensor) -> torch.Tensor:
    return x


def test_without_a_compiler_they_are_the_identity() -> None:
    x = torch.ones(2)
    assert ssd_fx.keep(x) is x
    assert ssd_fx.offload(x) is x
    with pytest.raises(ValueError, match=r"ssd_fx\.keep takes a tensor, not a tuple"):
        ssd_fx.keep((x, x))  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_under_other_backends_too(backend: str) -> None:
    x, w = inputs()
    marked, plain = (torch.compile(layers(mark), backend=backend, fullgraph=True) for mark in (ssd_fx.offload, none))
    assert_same_bits(gradients(marked, x, w), gradients(plain, x, w))


def test_export_and_vmap() -> None:
    class Marked(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.vmap(lambda row: ssd_fx.keep(row.sin()).cos())(x)

    x = torch.randn(4, 4)
    exported = torch.export.export(Marked(), (x,))
    assert torch.equal(exported.module()(x), x.sin().cos())


Toy = Callable[[Mark], Callable[..., torch.Tensor]]


@pytest.mark.parametrize("toy", [layers, attention, written])
def test_no_bit_changes(options: dict[str, object], toy: Toy) -> None:
    options |= {"inner": "aot_eager", "engine": "memory"}
    seen = []
    for mark, budget in ((none, 1.0), (ssd_fx.keep, 0), (ssd_fx.offload, 1.0)):
        more = options | {"budget": budget}
        compiled = torch.compile(toy(mark), backend=ssd_fx.backend, fullgraph=True, options=more)
        ssd_fx.reset_stats()
        seen.append(gradients(compiled, *inputs()))
        left = ssd_fx.stats().offloaded_bytes - ssd_fx.stats().held_bytes
        assert left > 0 or mark is not ssd_fx.offload
    assert_same_bits(seen[0], seen[1])
    assert_same_bits(seen[0], seen[2])


@pytest.mark.parametrize("inner", INNERS)
@pytest.mark.parametrize("mark", [ssd_fx.keep, ssd_fx.offload], ids=["keep", "offload"])
def test_an_input_that_is_changed_and_that_another_one_is_a_view_of(
    options: dict[str, object], inner: str, mark: Mark, tmp_path: Path
) -> None:
    """It is viewed anew from the memory of both: two nodes that were made under one annotation, and share it."""

    def function(mark: Mark, a: torch.Tensor, b: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        a.mul_(2)
        return ((mark(a) @ w).relu() * b.sum()).sum()

    found = []
    for who in (mark, none):
        base, w = (x.detach() for x in inputs())
        compiled = torch.compile(
            functools.partial(function, who),
            backend=ssd_fx.backend,
            options=options | {"inner": inner, "dump": str(tmp_path / who.__name__)},
        )
        found.append(
            (*gradients(lambda w, base=base, c=compiled: c(base.view(64, 64), base[:16], w), w.requires_grad_()), base)
        )
    assert_same_bits(*found)
    (row,) = re.findall(r"^as_strided_scatter .*", plan_text(tmp_path / mark.__name__), re.MULTILINE)
    assert f"marked by ssd_fx.{mark.__name__}" in row


@pytest.mark.parametrize("inner", INNERS)
@pytest.mark.parametrize("budget", [0, 1.0, "1TiB"])
def test_what_is_marked_leaves_whatever_the_budget(options: dict[str, object], inner: str, budget: object) -> None:
    """Where the budget has room for everything too, be it a share or bytes."""
    left = []
    for mark in (none, ssd_fx.offload):
        torch._dynamo.reset()
        ssd_fx.reset_stats()
        more = options | {"budget": budget, "inner": inner, "adapt": False}
        gradients(torch.compile(layers(mark), backend=ssd_fx.backend, options=more), *inputs())
        stats = ssd_fx.stats()
        left.append(stats.written_bytes + stats.cancelled_bytes)  # cancelled: wanted before it was written
    assert left[1] > 0
    assert left[1] == {0: left[0], 1.0: 2 * 64 * 64 * 4, "1TiB": 2 * 64 * 64 * 4}[budget]  # type: ignore[index]


@pytest.mark.parametrize(
    "toy", [layers, pytest.param(attention, marks=pytest.mark.slow), pytest.param(written, marks=pytest.mark.slow)]
)
def test_inductor_writes_the_same_code(options: dict[str, object], toy: Toy, tmp_path: Path) -> None:
    """Line for line where all is kept, but for comments, the name of the graph, and its plan."""
    options |= {"budget": 1.0}

    def run(mark: Mark) -> tuple[tuple[torch.Tensor, ...], str]:
        torch._dynamo.reset()
        compiled = torch.compile(toy(mark), backend=ssd_fx.backend, fullgraph=True, options=options)
        with graphs_cached_in(tmp_path / mark.__name__):
            grads, texts = run_and_get_code(lambda: gradients(compiled, *inputs()))
        assert len(texts) == 2
        return grads, re.sub(r"#.*|'[0-9a-f]{8}'|'[\w=-]{100,}'", "", "\n".join(texts))

    plain, code = run(none)
    assert ("_scaled_dot_product" in code) == (toy is attention)
    kept, kept_code = run(ssd_fx.keep)
    assert (kept_code == code) is True  # no diff of a thousand lines
    assert_same_bits(kept, plain)
    offloaded, _ = run(ssd_fx.offload)
    # Of `written` one: what is saved of its first product is the result of relu_, which is another value.
    assert ssd_fx.stats().stores >= (1 if toy is written else 2)
    assert_same_bits(offloaded, plain)


@pytest.mark.parametrize("inner", INNERS)
def test_the_dump_says_who_marked_what(options: dict[str, object], tmp_path: Path, inner: str) -> None:
    options |= {"inner": inner, "dump": str(tmp_path / "dump")}
    gradients(torch.compile(layers(ssd_fx.keep), backend=ssd_fx.backend, options=options), *inputs())
    marked = "marked by ssd_fx.keep"
    assert plan_text(tmp_path / "dump").count(marked) == 2
    (path,) = (tmp_path / "dump").glob("*.plan.json")
    reasons = {group["name"]: group["reason"] or group["decision"] for group in json.loads(path.read_text())["groups"]}
    assert {base: reason for base, reason in reasons.items() if base.startswith("mm")} == {
        "mm": marked,
        "mm_1": marked,
        "mm_2": "offload",
    }


@pytest.mark.parametrize("inner", INNERS)
def test_a_contradiction_reaches_the_user_as_what_it_is(options: dict[str, object], inner: str) -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (ssd_fx.offload(ssd_fx.keep(x @ w)).view(-1).view(64, 64) @ w).sum()

    compiled = torch.compile(function, backend=ssd_fx.backend, options=options | {"inner": inner})
    with pytest.raises(ValueError, match=r"tensor 'mm' \(16384 B\) is marked by ssd_fx\.keep and by ssd_fx\.offload"):
        compiled(*inputs())


def test_the_compile_cache_tells_marks_apart(options: dict[str, object], tmp_path: Path) -> None:
    """Graphs that differ in their marks alone have the same code."""
    offloaded, hits = [], []
    with graphs_cached_in(tmp_path):
        for mark in (ssd_fx.keep, ssd_fx.offload, ssd_fx.keep):
            torch._dynamo.reset()
            ssd_fx.reset_stats()
            counters.clear()
            compiled = torch.compile(layers(mark), backend=ssd_fx.backend, options=options | {"budget": 1.0})
            gradients(compiled, *inputs())
            offloaded.append(ssd_fx.stats().offloaded_bytes)
            hits.append(counters["aot_autograd"]["autograd_cache_hit"])
    assert hits == [0, 0, 1]
    assert offloaded == [0, 2 * 64 * 64 * 4, 0]


# Checkpoint policies.


@pytest.mark.parametrize("inner", INNERS)
def test_must_cpu_offload_trains_as_without_a_checkpoint(options: dict[str, object], inner: str) -> None:
    def run(policy: CheckpointPolicy) -> tuple[torch.Tensor, ...]:
        function = toys.checkpointed(layers(none), {torch.ops.aten.mm.default: policy})
        torch._dynamo.reset()  # its guards know nothing of policies
        ssd_fx.reset_stats()
        return gradients(torch.compile(function, backend=ssd_fx.backend, options=options), *inputs())

    options |= {"inner": inner, "budget": 1.0}
    saved = run(CheckpointPolicy.MUST_SAVE)
    assert ssd_fx.stats().offloaded_bytes == 0
    offloaded = run(CheckpointPolicy.MUST_CPU_OFFLOAD)
    assert ssd_fx.stats().offloaded_bytes == 3 * 64 * 64 * 4
    assert_same_bits(saved, offloaded)
    for ours, eager in zip(offloaded, gradients(layers(none), *inputs()), strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-2)  # gradients of about 1e4


# Patterns.


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Named()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).cos()


class Trainer:
    def __init__(self) -> None:
        self.model = Named()

    def step(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x) * 2


class Hoarding(Named):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.given = x  # from here on, Dynamo looks into self.__dict__
        return super().forward(x)


class HoardingTrainer(Trainer):
    def step(self, x: torch.Tensor) -> torch.Tensor:
        self.given = x
        return super().step(x)


def closure() -> Callable[[torch.Tensor], torch.Tensor]:
    model = Named()
    return lambda x: model(x) * 2


def compiled_with(what: object, options: dict[str, object], **more: object) -> Callable[[torch.Tensor], torch.Tensor]:
    return torch.compile(what, backend=ssd_fx.backend, options=options | {"inner": "aot_eager"} | more)  # type: ignore[call-overload,no-any-return]


@pytest.mark.parametrize(
    ("what", "pattern"),
    [
        (Named, "blocks.1.attn"),
        (Outer, "inner.blocks.1.attn"),
        (lambda: Trainer().step, "blocks.1.attn"),
        (closure, "blocks.1.attn"),
        (Hoarding, "blocks.1.attn"),
        (lambda: HoardingTrainer().step, "blocks.1.attn"),
    ],
    ids=["model", "nested", "method", "closure", "with an attribute", "a method that sets one"],
)
def test_names_are_those_of_named_modules(
    options: dict[str, object], tmp_path: Path, what: Callable[[], object], pattern: str
) -> None:
    dump = tmp_path / "dump"
    compiled_with(what(), options, dump=str(dump), keep=[pattern])(torch.randn(4, 8)).sum().backward()
    text = plan_text(dump)
    assert [line.split()[0] for line in text.splitlines() if f"keep=['{pattern}']" in line] == ["sigmoid_1"]
    assert "__dict__" not in text


NEAR = (
    r"module pattern 'blocks\.1\.atn' matches no module; did you mean 'blocks\.1\.attn' or .*The modules are: 'blocks'"
)


@pytest.mark.parametrize("inner", INNERS)
@pytest.mark.parametrize("option", ["keep", "offload"])
def test_a_pattern_that_names_nothing_is_an_error(options: dict[str, object], inner: str, option: str) -> None:
    compiled = compiled_with(Named(), options, inner=inner, **{option: ["*.mlp", "blocks.1.atn"]})
    with pytest.raises(ValueError, match=NEAR):
        compiled(torch.randn(4, 8))


def test_a_function_of_no_module_is_none(options: dict[str, object]) -> None:
    """A loss that is compiled for itself, with the patterns from the environment."""
    x, w = inputs(8)
    gradients(compiled_with(lambda x, w: (x @ w).sin().sum(), options, keep=["blocks.0"]), x, w)


def test_graphs_that_hold_other_modules_are_none(options: dict[str, object]) -> None:
    model = Named()

    def function(x: torch.Tensor) -> torch.Tensor:
        x = model.blocks[0](x)
        torch._dynamo.graph_break()
        return model.head(x)

    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        for pattern in ("blocks.0", "head", "blocks.1"):
            compiled_with(function, options, keep=[pattern])(torch.randn(4, 8)).sum().backward()
    with pytest.raises(ValueError, match=r"'blocks\.2' matches no module; did you mean 'blocks\.1' or 'blocks\.0'"):
        compiled_with(function, options, keep=["blocks.2"])(torch.randn(4, 8))


def test_blocks_that_are_compiled_one_by_one_have_their_own_names(options: dict[str, object]) -> None:
    def run(pattern: str) -> None:
        torch._dynamo.reset()
        model = Named()
        for block in model.blocks:
            block.compile(backend=ssd_fx.backend, options=options | {"inner": "aot_eager", "keep": [pattern]})
        model(torch.randn(4, 8)).sum().backward()

    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        for pattern in ("attn", "*.attn", "head"):  # head is another part of the model
            run(pattern)
    with pytest.warns(
        RuntimeWarning, match=r"'blocks\.0\.attn' has no effect on NamedBlock, which is compiled by itself"
    ):
        run("blocks.0.attn")
    with pytest.raises(ValueError, match=r"'hed' matches no module; did you mean 'head'\?"):
        run("hed")


def test_a_break_inside_a_block_compiles_it_by_itself(
    options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NamedBlock, "breaks", True)
    with pytest.warns(RuntimeWarning, match=r"'blocks\.1\.attn' has no effect on NamedBlock"):
        compiled_with(Named(), options, keep=["blocks.1.attn"])(torch.randn(4, 8))


@pytest.mark.parametrize("pattern", ["head", "*.attn"])
def test_a_pattern_that_only_an_earlier_model_had_is_an_error(options: dict[str, object], pattern: str) -> None:
    compiled_with(Named(), options, keep=[pattern])(torch.randn(4, 8)).sum().backward()
    other = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    with pytest.raises(ValueError, match=rf"{re.escape(repr(pattern))} matches no module.*The modules are: '0', '1'"):
        compiled_with(other, options, keep=[pattern])(torch.randn(4, 8))


def test_a_pattern_of_modules_that_save_nothing_is_a_note(
    options: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Flatten(), nn.Tanh(), nn.Linear(16, 8))
    with caplog.at_level(logging.INFO, "ssd_fx"):
        compiled_with(model, options, keep=["2"], offload=["1"])(torch.randn(4, 2, 8)).sum().backward()
    notes = [r.getMessage() for r in caplog.records if "has no effect" in r.getMessage()]
    assert [note.partition(" in graph ")[0] for note in notes] == ["module pattern '1' has no effect"]


def second_model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


def arguments(break_: Callable[[], None]) -> Callable[[torch.Tensor], torch.Tensor]:
    """The first model is an argument that the second graph has no use for."""

    def function(x: torch.Tensor, first: nn.Module, second: nn.Module) -> torch.Tensor:
        x = first(x)
        break_()
        return second(x)  # type: ignore[no-any-return]

    return functools.partial(function, first=NamedBlock(), second=second_model())


def dictionary(break_: Callable[[], None]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Both models are in a dictionary."""
    models = {"first": NamedBlock(), "second": second_model()}

    def function(x: torch.Tensor) -> torch.Tensor:
        x = models["first"](x)
        break_()
        return models["second"](x)  # type: ignore[no-any-return]

    return function


def state(break_: Callable[[], None]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Both models are attributes of an object."""
    held = SimpleNamespace(first=NamedBlock(), second=second_model())

    def function(x: torch.Tensor) -> torch.Tensor:
        x = held.first(x)
        break_()
        return held.second(x)  # type: ignore[no-any-return]

    return function


class Teacher(nn.Module):
    def __init__(self, break_: Callable[[], None]) -> None:
        super().__init__()
        self.layer, self.break_ = nn.Linear(8, 8), break_

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.break_()
        return self.layer(x).tanh()


class Distilled(nn.Module):
    """The teacher is in a list, so that it is no module of this one, and breaks off a graph of its own."""

    def __init__(self, break_: Callable[[], None]) -> None:
        super().__init__()
        self.block, self.teacher = NamedBlock(), [Teacher(break_)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.teacher[0](self.block(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("what", "pattern"),
    [
        *[
            (arguments, "attn"),
            (arguments, "1"),
            (dictionary, "attn"),
            (dictionary, "1"),
            (state, "attn"),
            (state, "1"),
        ],
        (Distilled, "block.attn"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_pattern_names_a_module_of_one_of_several_graphs(
    options: dict[str, object],
    tmp_path: Path,
    what: Callable[[Callable[[], None]], Callable[[torch.Tensor], torch.Tensor]],
    pattern: str,
) -> None:
    """Whichever graph it is, and when both are compiled again for another number of rows."""
    dump = tmp_path / "dump"
    compiled = compiled_with(what(torch._dynamo.graph_break), options, dump=str(dump), keep=[pattern])
    for rows in (4, 6):
        compiled(torch.randn(rows, 8)).sum().backward()
    plans = [path.read_text() for path in dump.glob("*.plan.txt")]
    assert sorted(plan.count(f" keep     keep=['{pattern}'] ") for plan in plans) == [0, 0, 1, 1]


def test_a_renamed_module_is_another_entry_of_the_compile_cache(options: dict[str, object], tmp_path: Path) -> None:
    """Modules without parameters leave no trace in the graph's code."""

    class Act(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name
            self.first, self.second = nn.Sigmoid(), nn.Sigmoid()

        def forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return (getattr(self, self.name)(x @ w) @ w).sum()

    offloaded = []
    with graphs_cached_in(tmp_path):
        for name in ("first", "second"):
            torch._dynamo.reset()
            ssd_fx.reset_stats()
            more = {"offload": ["first"], "budget": 1.0}
            gradients(torch.compile(Act(name), backend=ssd_fx.backend, options=options | more), *inputs())
            offloaded.append(ssd_fx.stats().offloaded_bytes)
    assert offloaded[0] != offloaded[1] == 0


def test_a_preference_has_no_effect_where_all_may_stay(options: dict[str, object]) -> None:
    policies = {torch.ops.aten.mm.default: CheckpointPolicy.PREFER_CPU_OFFLOAD}
    function = toys.checkpointed(layers(none), policies)
    for recompute in (False, True):
        ssd_fx.reset_stats()
        more = {"inner": "aot_eager", "budget": 1.0, "recompute": recompute}
        gradients(torch.compile(function, backend=ssd_fx.backend, options=options | more), *inputs())
        assert ssd_fx.stats().offloaded_bytes == 0
        torch._dynamo.reset()
