"""What marks, patterns and checkpoint policies make of the plan, exactly."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from expecttest import assert_expected_inline
from torch.utils.checkpoint import CheckpointPolicy

import ssd_fx
from ssd_fx.passes.joint.modules import enclosing, matches
from ssd_fx.passes.plan import Keep
from tests.models import Named
from tests.passes import toys
from tests.unlike import OTHER_NAMES

Caller = Callable[[torch.Tensor], torch.Tensor]


def none(x: torch.Tensor) -> torch.Tensor:
    return x


def check(toy: toys.Toy, expected: str, *args: torch.Tensor, **changes: object) -> None:
    assert_expected_inline(toys.planned(toy, *args, **changes).table.strip("\n"), expected, skip=1)


def chain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """mm -> sigmoid -> mm -> sigmoid -> mm: each sigmoid is saved."""
    return (((x @ w).sigmoid() @ w).sigmoid() @ w).sum()


def kept(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """`chain`, the first sigmoid marked keep."""
    return ((ssd_fx.keep((x @ w).sigmoid()) @ w).sigmoid() @ w).sum()


def offloaded(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """`chain`, the first sigmoid marked offload, twice."""
    return ((ssd_fx.offload(ssd_fx.offload((x @ w).sigmoid())) @ w).sigmoid() @ w).sum()


def view_marked(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """mm -> chunk -> q, k, v saved; only k, a view of what is stored, is marked."""
    q, k, v = (x @ torch.cat([w, w, w], 1)).chunk(3, dim=1)
    return ((q @ ssd_fx.keep(k).t()) @ v).sum()


def overwritten(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The marked tensor is overwritten: relu, which is saved, is another tensor."""
    y = ssd_fx.keep(x @ w)
    y.relu_()
    return (y @ w).sum()


def output_marked(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """What is marked is returned."""
    return ssd_fx.offload((x @ w).exp())


def contradiction(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A tensor to be kept, and its view to be offloaded."""
    y = ssd_fx.keep((x @ w).sigmoid())
    return (ssd_fx.offload(y.view(4, 16)) @ w.view(16, 4)).sum()


def marked_scalar(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A single number is marked to leave."""
    y = x @ w
    return (y * ssd_fx.offload(y.mean().exp())).sum()


def test_keep_stays_where_nothing_else_does() -> None:
    check(
        kept,
        """\
sigmoid    256 B  keep     marked by ssd_fx.keep                              [sigmoid]
sigmoid_1  256 B  offload  store>sigmoid_1 release>t_4 load<expand wait<mm_3  [sigmoid_1]""",
    )


def test_offload_leaves_though_it_is_small_and_all_fits() -> None:
    check(
        offloaded,
        """\
sigmoid    256 B  offload  store>sigmoid release>mm_2 load<expand wait<mm_5 (marked by ssd_fx.offload)  [sigmoid]
sigmoid_1  256 B  keep     below min_bytes                                                              [sigmoid_1]""",
        budget=1.0,
        min_bytes=1 << 20,
    )


def test_a_marked_graph_is_partitioned_as_an_unmarked_one() -> None:
    plain, marked = (toys.partitioned(toy) for toy in (chain, offloaded))

    def code(module: torch.fx.GraphModule) -> list[object]:
        index = {n: i for i, n in enumerate(module.graph.nodes)}  # names count what was traced, marks among it
        return [
            (n.op, n.target if n.op == "call_function" else "", [index[a] for a in n.all_input_nodes]) for n in index
        ]

    assert code(plain.forward) == code(marked.forward)
    assert code(plain.backward) == code(marked.backward)


def test_a_view_marks_what_is_stored() -> None:
    check(
        view_marked,
        """\
cat   768 B  offload  store>cat release>t_7 load<expand wait<mm_8   [t_7]
mm    768 B  keep     marked by ssd_fx.keep                         [t_2, t_3, t_4]
mm_1  256 B  offload  store>mm_1 release>t_7 load<expand wait<mm_3  [t_1]""",
    )


@OTHER_NAMES
def test_what_is_written_after_the_mark_is_another_tensor(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ssd_fx"):
        check(overwritten, """relu  256 B  offload  store>relu release>t_3 load<expand wait<mm_2  [alias_2]""")
    assert "ssd_fx.keep of 'mm' has no effect in graph" in caplog.text
    assert "y = ssd_fx.keep(x @ w)" in caplog.text


def test_a_marked_output_is_a_note(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ssd_fx"):
        check(output_marked, """""")
    assert "ssd_fx.offload of 'exp' has no effect in graph" in caplog.text


def test_a_contradiction_names_both() -> None:
    with pytest.raises(
        ValueError,
        match=r"tensor 'sigmoid' \(256 B\) is marked by ssd_fx\.keep and by ssd_fx\.offload, itself or as a view",
    ):
        toys.planned(contradiction)


def test_an_obstacle_is_loud() -> None:
    with pytest.warns(
        RuntimeWarning,
        match=r"cannot offload all that is marked so in graph \w+: 'exp' \(4 B, marked by ssd_fx\.offload: scalar",
    ):
        planned = toys.planned(marked_scalar)
    stuck = next(g for g in planned.plan.groups if g.base == "exp")
    assert isinstance(planned.plan.decisions[stuck.slot], Keep)


# Checkpoint policies.


def under(policy: CheckpointPolicy) -> toys.Toy:
    """`chain` in a checkpointed region, every mm under `policy`."""
    return toys.checkpointed(chain, {torch.ops.aten.mm.default: policy})


def test_must_save_is_saved_and_the_planner_is_free() -> None:
    check(
        under(CheckpointPolicy.MUST_SAVE),
        """\
mm    256 B  offload  store>mm release>mm_2 load<expand wait<sigmoid     [mm]
mm_1  256 B  offload  store>mm_1 release>t_4 load<expand wait<sigmoid_1  [mm_1]""",
    )
    check(
        under(CheckpointPolicy.MUST_SAVE),
        """\
mm    256 B  offload  store>mm release>mm_2 load<expand wait<sigmoid  [mm]
mm_1  256 B  keep     within the budget                               [mm_1]""",
        budget=0.5,
    )


@pytest.mark.parametrize(
    ("policy", "saved"),
    [
        (CheckpointPolicy.MUST_SAVE, ["mm", "sin"]),
        (CheckpointPolicy.MUST_CPU_OFFLOAD, ["mm", "sin"]),
        (CheckpointPolicy.PREFER_SAVE, ["mm"]),  # the min-cut is free, and sin is cheap
        (CheckpointPolicy.PREFER_CPU_OFFLOAD, ["mm"]),
        (CheckpointPolicy.MUST_RECOMPUTE, ["mm"]),
        (CheckpointPolicy.PREFER_RECOMPUTE, ["mm"]),
    ],
)
def test_the_min_cut_obeys_what_must_be(policy: CheckpointPolicy, saved: list[str]) -> None:
    """mm -> sin -> cos: the backward of cos reads sin, which can be had from mm."""

    def region(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x @ w).sin().cos().sum()

    policies = {torch.ops.aten.sin.default: policy, torch.ops.aten.mm.default: CheckpointPolicy.MUST_SAVE}
    plan = toys.planned(toys.checkpointed(region, policies)).plan
    assert [g.base for g in plan.groups] == saved


@pytest.mark.parametrize("policy", [CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE])
def test_what_is_to_be_recomputed_is(policy: CheckpointPolicy) -> None:
    planned = toys.planned(under(policy))
    assert planned.plan.groups == ()
    mms = [n for n in planned.partition.backward.graph.nodes if n.target is torch.ops.aten.mm.default]
    assert len(mms) == 6 + 2  # three products of two gradients each, and the two that the sigmoids come from


def test_must_cpu_offload_is_saved_and_leaves() -> None:
    check(
        under(CheckpointPolicy.MUST_CPU_OFFLOAD),
        """\
mm    256 B  offload  store>mm release>mm_2 load<expand wait<sigmoid (MUST_CPU_OFFLOAD)     [mm]
mm_1  256 B  offload  store>mm_1 release>t_4 load<expand wait<sigmoid_1 (MUST_CPU_OFFLOAD)  [mm_1]""",
        budget=1.0,
        min_bytes=1 << 20,
    )
    found = toys.planned(under(CheckpointPolicy.MUST_CPU_OFFLOAD)).plan.marks
    assert {(m.decision, m.tier) for m in found.values()} == {("offload", "host")}


def test_prefer_cpu_offload_goes_first() -> None:
    """mm and sigmoid are of one size; without the tag the longest idle one goes."""

    def toy(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = (x @ w).sigmoid()
        return under(CheckpointPolicy.PREFER_CPU_OFFLOAD)(y, w)

    check(
        toy,
        """\
sigmoid  256 B  offload  store>sigmoid release>t_6 load<detach_3 wait<mm_8                       [sigmoid]
mm_1     256 B  offload  store>mm_1 release>t_6 load<expand wait<sigmoid_1 (PREFER_CPU_OFFLOAD)  [mm_1]
mm_2     256 B  offload  store>mm_2 release>t_6 load<expand wait<sigmoid_2 (PREFER_CPU_OFFLOAD)  [mm_2]""",
        budget=0.5,
    )


@pytest.mark.parametrize(("budget", "min_bytes", "gone"), [(0.99, 0, 2), (1.0, 0, 0), (0, 257, 0)])
def test_prefer_cpu_offload_binds_unless_all_may_stay(budget: float, min_bytes: int, gone: int) -> None:
    """With room for all but a hundredth both leave; neither where there is room for both, or where they are small."""
    plan = toys.planned(under(CheckpointPolicy.PREFER_CPU_OFFLOAD), budget=budget, min_bytes=min_bytes).plan
    assert [g.nbytes for g in plan.groups] == [256, 256]
    assert len(plan.offloaded) == gone


def test_a_call_outweighs_a_policy() -> None:
    def region(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (ssd_fx.keep(x @ w).sigmoid() @ w).sum()

    toy = toys.checkpointed(region, {torch.ops.aten.mm.default: CheckpointPolicy.MUST_CPU_OFFLOAD})
    check(
        toy,
        """mm  256 B  keep  marked by ssd_fx.keep  [mm]""",
    )


# Module name patterns.


def check_modules(expected: str, **changes: object) -> None:
    """Base, module, decision and mark of every group of `Named`."""
    plan = toys.planned(Named(), toys.inputs()[0], **changes).plan
    lines = []
    for group in plan.groups:
        decision, mark = plan.decisions[group.slot], plan.marks.get(group.slot)
        what = f"keep {decision.reason}" if isinstance(decision, Keep) else "offload"
        lines.append(f"{group.base} {plan.modules[group.slot]} {what} ({mark.reason if mark else ''})")
    assert_expected_inline("\n".join(lines), expected, skip=1)


def test_patterns_and_names() -> None:
    check_modules(
        """\
sigmoid blocks.0.attn keep keep=['blocks.0'] (keep=['blocks.0'])
tanh blocks.0.mlp.1 offload (offload=['*.mlp'])
exp blocks.0 keep keep=['blocks.0'] (keep=['blocks.0'])
sigmoid_1 blocks.1.attn offload ()
tanh_1 blocks.1.mlp.1 offload (offload=['*.mlp'])
exp_1 blocks.1 keep within the budget ()
mm_4 head keep within the budget ()""",
        keep=("blocks.0",),
        offload=("*.mlp",),
        budget=0.5,
    )


def test_a_pattern_heeds_min_bytes() -> None:
    check_modules(
        """\
sigmoid blocks.0.attn keep below min_bytes (offload=['*'])
tanh blocks.0.mlp.1 keep below min_bytes (offload=['*'])
exp blocks.0 keep below min_bytes (offload=['*'])
sigmoid_1 blocks.1.attn keep below min_bytes (offload=['*'])
tanh_1 blocks.1.mlp.1 keep below min_bytes (offload=['*'])
exp_1 blocks.1 keep below min_bytes (offload=['*'])
mm_4 head keep below min_bytes (offload=['*'])""",
        offload=("*",),
        budget=1.0,
        min_bytes=257,
    )


def test_the_innermost_module_wins() -> None:
    check_modules(
        """\
sigmoid blocks.0.attn offload (offload=['blocks.0'])
tanh blocks.0.mlp.1 offload (offload=['blocks.0'])
exp blocks.0 offload (offload=['blocks.0'])
sigmoid_1 blocks.1.attn offload (offload=['blocks.1.*'])
tanh_1 blocks.1.mlp.1 offload (offload=['blocks.1.*'])
exp_1 blocks.1 keep keep=['blocks'] (keep=['blocks'])
mm_4 head offload ()""",
        keep=("blocks",),
        offload=("blocks.1.*", "blocks.0"),
    )


def test_patterns_of_one_module_that_disagree() -> None:
    with pytest.raises(
        ValueError,
        match=r"of module 'blocks\.0\.attn' is to be kept by keep=\['\*\.attn'\] and offloaded by offload=\['bl",
    ):
        toys.planned(Named(), toys.inputs()[0], keep=("*.attn",), offload=("blocks.0.attn",))


def test_module_names() -> None:
    planned = toys.planned(Named(), toys.inputs()[0])
    forward = {n.name: n for n in planned.partition.forward.graph.nodes}
    assert enclosing(forward["sigmoid"]) == ("", "blocks", "blocks.0", "blocks.0.attn")
    assert enclosing(forward["sigmoid"], ("L['self'].blocks.0",)) == ("", "attn")


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        *[("*.attn", "blocks.0.attn", True), ("*.attn", "attn", True), ("*.attn", "blocks.0.attn.qkv", False)],
        *[("blocks.[0-3]", "blocks.2", True), ("blocks.[0-3]", "blocks.4", False), ("blocks", "blocks.0", False)],
        *[("*", "", True), ("attn", "blocks.0.attn", False), ("Blocks", "blocks", False)],
    ],
)
def test_matching(pattern: str, name: str, expected: bool) -> None:
    assert matches(pattern, name) is expected


def copy_marked(copy: Caller = none, source: Caller = none) -> toys.Toy:
    """sigmoid -> t -> contiguous: both saved, one a copy of the other."""

    def toy(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = source((x @ w).sigmoid())
        return (copy(y.t().contiguous()) @ w).sum() + (y * y).sum()

    return toy


@pytest.mark.parametrize(
    ("toy", "budget", "expected"),
    [
        (copy_marked(), 0, ["offload 2"]),
        (copy_marked(copy=ssd_fx.keep), 0, ["offload 1", "keep 1"]),
        (copy_marked(source=ssd_fx.keep), 0, ["keep 1", "offload 1"]),
        (copy_marked(copy=ssd_fx.offload), 1.0, ["keep 1", "offload 1"]),
        (copy_marked(copy=ssd_fx.keep, source=ssd_fx.offload), 1.0, ["offload 1", "keep 1"]),
        (copy_marked(copy=ssd_fx.offload, source=ssd_fx.offload), 1.0, ["offload 2"]),
    ],
)
def test_a_copy_that_is_marked_in_its_own_right_is_no_member(toy: toys.Toy, budget: float, expected: list[str]) -> None:
    plan = toys.planned(toy, budget=budget).plan
    groups = [g for g in plan.groups if g.base in ("sigmoid", "clone")]
    assert [f"{type(plan.decisions[g.slot]).__name__.lower()} {len(g.members)}" for g in groups] == expected
