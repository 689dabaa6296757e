"""A function as policy: what it is asked, what it may answer, and what compile caches make of it."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

import ssd_fx
from ssd_fx import Config, SavedTensor
from ssd_fx.policy import Policy
from tests.bitwise import assert_same_bits
from tests.inductor import graphs_cached_in
from tests.passes import toys

TOY: dict[str, object] = {"inner": "aot_eager", "engine": "memory", "machine": "default", "min_bytes": 0, "budget": 0}
TOY |= {"recompute": True}  # the tests turn it off in the environment
Function = Callable[[SavedTensor], object]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(16, 32, bias=False), nn.GELU(), nn.Linear(32, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.up(x))).sin().sum()


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def batch() -> torch.Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(0))


def decided(policy: Function, **options: object) -> dict[str, tuple[str, str]]:
    """The decision about each group of `Net`, and the reason for it."""
    (found,) = ssd_fx.explain(net(), options=TOY | {"policy": policy} | options)(batch()).dumps
    return {group["name"]: (group["decision"], group["reason"] or "") for group in found.plan["groups"]}


def trained(options: dict[str, object]) -> list[torch.Tensor]:
    torch._dynamo.reset()
    model = net()
    torch.compile(model, backend=ssd_fx.backend, options=options)(batch()).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def test_what_it_is_asked() -> None:
    asked: dict[str, SavedTensor] = {}

    def noted(saved: SavedTensor) -> None:
        asked[saved.name] = saved

    decided(noted, recompute=False)
    assert asked["mm"] == SavedTensor("mm", "up", "aten.mm.default", (8, 32), torch.float32, 8 * 32 * 4)
    assert asked["gelu"] == SavedTensor("gelu", "act", "aten.gelu.default", (8, 32), torch.float32, 8 * 32 * 4)
    assert [(s.op, s.module) for s in asked.values() if s.op == "input"] == [("input", "")]


@pytest.mark.parametrize("budget", [0, 1.0])
def test_its_answers_hold_whatever_the_budget(budget: object) -> None:
    answers = {"mm": "keep", "gelu": "offload"}

    def by_name(saved: SavedTensor) -> str | None:
        return answers.get(saved.name)

    found = decided(by_name, budget=budget, recompute=False)
    name = "policy test_its_answers_hold_whatever_the_budget.by_name"
    assert found["mm"] == ("keep", f"{name} says keep")
    assert found["gelu"][0] == "offload"
    assert found["mm_1"][0] == ("offload" if budget == 0 else "keep")  # the planner's


def test_without_an_answer_it_changes_nothing() -> None:
    def silent(saved: SavedTensor) -> None:
        return

    (found,) = ssd_fx.explain(net(), options=TOY | {"policy": silent})(batch()).dumps
    (alone,) = ssd_fx.explain(net(), options=TOY)(batch()).dumps
    assert found.plan["groups"] == alone.plan["groups"]


def test_what_is_small_or_cannot_leave_is_not_asked_about() -> None:
    asked = set()

    def noted(saved: SavedTensor) -> str:
        asked.add(saved.name)
        return "offload"

    found = decided(noted, min_bytes=1000, recompute=False)
    assert asked == {"mm", "gelu"}
    assert found["mm_1"] == ("keep", "below min_bytes")


def test_what_is_to_be_computed_again_is_not_saved() -> None:
    def again(saved: SavedTensor) -> str:
        return "recompute" if saved.op == "aten.gelu.default" else "offload"

    (found,) = ssd_fx.explain(net(), options=TOY | {"policy": again})(batch()).dumps
    assert [each["name"] for each in found.plan["recomputed"]] == ["gelu"]
    assert "gelu" not in {group["name"] for group in found.plan["groups"]}
    assert "aten.gelu.default" in found.backward
    assert_same_bits(trained(TOY | {"policy": again}), trained(TOY | {"budget": 1.0, "recompute": False}))


def test_all_is_to_be_computed_again() -> None:
    def again(saved: SavedTensor) -> str:
        return "recompute"

    found = decided(again)
    kept = {name: reason for name, (decision, reason) in found.items() if decision == "keep"}
    assert found.keys() == kept.keys(), "nothing else was asked for"
    assert all(reason.endswith("says recompute, and it cannot be computed again") for reason in kept.values())
    assert not {"mm", "gelu"} & kept.keys()
    assert_same_bits(trained(TOY | {"policy": again}), trained(TOY | {"budget": 1.0, "recompute": False}))


def test_nothing_may_be_computed_again() -> None:
    def again(saved: SavedTensor) -> str | None:
        return "recompute" if saved.name == "gelu" else None

    name = "policy test_nothing_may_be_computed_again.again"
    assert decided(again, recompute=False)["gelu"] == ("keep", f"{name} says recompute, and recompute=False")


@pytest.mark.parametrize("answer", ["disk", True, 1])
def test_what_is_no_answer(answer: object) -> None:
    def wrong(saved: SavedTensor) -> object:
        return answer if saved.name == "mm" else None

    message = rf"policy test_what_is_no_answer\.wrong returns {answer!r} for tensor 'mm' of module 'up'; right would "
    with pytest.raises(ValueError, match=message + "be 'keep', 'offload', 'recompute' or None"):
        decided(wrong)


def test_patterns_and_calls_override_it_and_it_overrides_checkpoints() -> None:
    contexts = toys.choosing({}, CheckpointPolicy.MUST_CPU_OFFLOAD)

    def region(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return ((ssd_fx.offload(x @ w) @ w).sin() @ w).sum()

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return checkpoint(region, x, w, use_reentrant=False, context_fn=contexts)  # type: ignore[no-any-return]

    def keeps(saved: SavedTensor) -> str:
        return "keep"

    args = [torch.randn(16, 16, requires_grad=True) for _ in range(2)]
    (found,) = ssd_fx.explain(function, options=TOY | {"policy": keeps, "recompute": False})(*args).dumps
    assert {g["name"]: g["decision"] for g in found.plan["groups"]} == {
        **{name: "keep" for name in ("primals_1", "primals_2", "mm_1", "sin", "mm_2") if f"{name} " in found.table},
        "mm": "offload",
    }
    kept = decided(keeps, offload=["act"], recompute=False)
    assert kept["gelu"][0] == "offload"
    assert kept["mm"][0] == "keep"


def test_a_name_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSD_FX_POLICY", "tests.test_policy:at_the_top")
    found = Config.make().policy
    assert found is not None
    assert (found.function, found.name) == (at_the_top, "at_the_top")
    monkeypatch.setenv("SSD_FX_POLICY", "")
    assert Config.make().policy is None
    monkeypatch.setenv("SSD_FX_POLICY", "tests.test_policy:nobody")
    with pytest.raises(ValueError, match=r"^SSD_FX_POLICY in the environment: option policy=.* names nothing that can"):
        Config.make()
    with pytest.raises(ValueError, match=r"option policy=3 is no function; right would be one that takes an ssd_fx\.S"):
        Config.make({"policy": 3})


def at_the_top(saved: SavedTensor) -> None:
    return


class Versioned:
    """Offloads what is large; its `uuid` says what it does."""

    def __init__(self, least: int) -> None:
        self.least = least

    def __call__(self, saved: SavedTensor) -> str:
        return "offload" if saved.nbytes >= self.least else "keep"

    def uuid(self) -> object:
        return "large", self.least


@pytest.mark.parametrize("said", [Versioned, "tests.test_policy:Versioned"])
def test_a_class_is_no_policy(said: object) -> None:
    """An object of it was meant, and its methods need one."""
    right = r"option policy=.*Versioned.* is a class; right would be an object of it, such as Versioned\(\.\.\.\)$"
    with pytest.raises(ValueError, match=right):
        Config.make({"policy": said})


def test_what_caches_know_a_policy_by() -> None:
    def other(saved: SavedTensor) -> None:
        return

    assert Policy.of(Versioned(1)) == Policy.of(Versioned(1)) != Policy.of(Versioned(2))
    assert Policy.of(at_the_top) == Policy.of(at_the_top) != Policy.of(other)
    assert Policy.of(Versioned(1)).uuid == "('large', 1)"
    assert Policy.of(other).uuid == ""
    policy = Policy.of(other)
    assert copy.deepcopy(policy).function is other
    left = pickle.loads(pickle.dumps(policy))  # as for the key of a compile cache; `other` itself cannot be pickled
    assert left == policy
    with pytest.raises(RuntimeError, match="a policy is not pickled with its graph, so nobody can ask it about 'x'"):
        left(SavedTensor("x", "", "input", (), torch.float32, 4))


def test_a_bound_method_is_one_policy_and_its_object_may_go() -> None:
    class Holder:
        def decide(self, saved: SavedTensor) -> None:
            return

    holder = Holder()
    assert Policy.of(holder.decide) == Policy.of(holder.decide) != Policy.of(Holder().decide)
    gone = weakref.ref(holder)
    del holder
    gc.collect()
    assert gone() is None


def test_a_child_is_another_process_to_compile_caches() -> None:
    """Its functions have the numbers that those of another child have."""
    from ssd_fx.passes import partitioner

    reader, writer = os.pipe()
    if not (child := os.fork()):
        os.write(writer, partitioner._PROCESS.encode())
        os._exit(0)
    os.waitpid(child, 0)
    told = os.read(reader, 100).decode()
    assert len(told) == len(partitioner._PROCESS)
    assert told != partitioner._PROCESS
    os.close(reader)
    os.close(writer)


def test_graphs_have_the_names_that_they_had_without_one() -> None:
    names = [Config.make({"policy": each}).digest() for each in (None, Versioned(1), Versioned(1), Versioned(2))]
    assert names[0] == Config.make().digest()
    assert names[1] == names[2] != names[3] != names[0]


@pytest.mark.slow
def test_the_compile_cache_tells_policies_apart(tmp_path: Path) -> None:
    """And where nothing identifies a function, only this process finds its graphs again."""
    found = []
    options = {"dirs": [str(tmp_path)], "min_bytes": 0, "budget": 1.0, "machine": "default", "recompute": False}
    with graphs_cached_in(tmp_path), warnings.catch_warnings():
        for policy in (Versioned(0), Versioned(10**6), Versioned(0), at_the_top, at_the_top, lambda saved: None):
            ssd_fx.reset_stats()
            counters.clear()
            trained(options | {"policy": policy})
            found.append((ssd_fx.stats().offloaded_bytes > 0, counters["aot_autograd"]["autograd_cache_hit"]))
    assert found == [(True, 0), (False, 0), (True, 1), (False, 0), (False, 1), (False, 0)]


def test_only_this_process_finds_the_graphs_of_a_function_without_a_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    from ssd_fx.backend import plan_options
    from ssd_fx.passes import partitioner

    def keys() -> list[str]:
        made = [Config.make(TOY | {"policy": policy}) for policy in (Versioned(0), at_the_top)]
        return [partitioner.Partitioner(plan_options(each, torch.device("cpu"))).uuid() for each in made]

    here = keys()
    assert keys() == here
    monkeypatch.setattr(partitioner, "_PROCESS", "another")
    assert [a == b for a, b in zip(keys(), here, strict=True)] == [True, False]
