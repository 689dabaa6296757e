"""A step of equal layers on a drive that is slower than compute: never worse than a checkpoint of every layer."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from ssd_fx.passes.axis import CHOICES, Choice, Item, Shared, Step
from ssd_fx.passes.cost.machine import Machine
from ssd_fx.passes.plan import Limits
from ssd_fx.passes.planner.budget import is_worth, limits, solve_for
from ssd_fx.passes.planner.replay import replay
from ssd_fx.passes.planner.segments import boundaries
from ssd_fx.passes.planner.solve import solve
from ssd_fx.passes.schedule import Replay, Schedule
from tests.passes.planner.layered import layered_instance

ALL = CHOICES
LAYERS, PER_LAYER = 6, 4


def layered() -> Step:
    """Each layer: its input of 10 bytes, a norm of 10, a product of 40 and what is made of it, another 40.

    An operator a tensor, of 1 s in the forward and 2 s in the backward. The product takes a second again, the input of
    the next layer two, the others a tenth.
    """
    count = LAYERS * PER_LAYER
    items = []
    for i in range(count):
        kind, first_use = i % PER_LAYER, 2 * count - 1 - i
        nbytes, again = ((10, 2.0), (10, 0.1), (40, 1.0), (40, 0.1))[kind]
        needs = () if i == 0 else (i - 1,)
        choices = ALL if i else frozenset({Choice.KEEP, Choice.OFFLOAD})
        items.append(Item(nbytes, i, min(i + 1, count - 1), first_use, first_use, again, choices, needs))
    return Step((1.0,) * count + (2.0,) * count, (5,) * (2 * count), count, tuple(items))


def checkpointed(step: Step) -> Replay:
    """Every layer's input is kept, and all else recomputed."""
    choices = [Choice.KEEP if i % PER_LAYER == 0 else Choice.RECOMPUTE for i in range(len(step.items))]
    return replay(step, choices, Schedule(), machine(1.0))


def machine(bandwidth: float) -> Machine:
    return Machine(1.0, 1.0, bandwidth, bandwidth, latency_s=0.0)


def test_layers_meet_where_few_bytes_are_needed() -> None:
    """Across the end of a layer nothing is needed but the input of the next one."""
    found = boundaries(layered())
    inputs = [frozenset({i}) for i in range(PER_LAYER, LAYERS * PER_LAYER, PER_LAYER)]
    assert [each for each in found if each in inputs] == inputs


@pytest.mark.parametrize("bandwidth", [0.1, 1.0, 5.0, 20.0, 1000.0])
def test_a_checkpoint_of_every_layer_is_never_better(bandwidth: float) -> None:
    step, rival = layered(), checkpointed(layered())
    found = solve(step, machine(bandwidth), limit=rival.peak, share_bytes=math.inf)
    assert found.peak <= rival.peak
    assert found.seconds <= 1.005 * rival.seconds


@pytest.mark.parametrize(("seed", "share", "optimum_s"), [(2, 0.2, 0.025401), (0, 0.0, 0.050998)])
def test_a_whole_layer_is_recomputed_where_its_norm_leaves_no_memory_for_that(
    seed: int, share: float, optimum_s: float
) -> None:
    """Attention's inputs and its result go together, and the norm before them, which is cheaper, is offloaded.

    The mixed-integer program proves the optimum in seconds (`benchmarks/optimality.py --layered`).
    """
    instance = layered_instance(seed)
    at = limits(instance.step, share, whole=True)
    found = solve(instance.step, instance.machine, limit=at.memory, share_bytes=at.kept, quick=True)
    assert found.seconds <= 1.06 * optimum_s


@pytest.mark.parametrize(
    ("seed", "share", "optimum_s"),
    [(4, 0.2, 0.00266021), (15, 0.0, 0.0155058), (6, 0.2, 0.013142969)],
    ids=["exchange", "turn", "two layers"],
)
def test_what_the_programs_prove_is_found(seed: int, share: float, optimum_s: float) -> None:
    """Two items change places. One release less blocks where the backward begins, as there is room until later. One
    layer keeps its norm in place of its input, and the next one its input in place of attention's result."""
    instance = layered_instance(seed)
    at = limits(instance.step, share, whole=True)
    found = solve(instance.step, instance.machine, limit=at.memory, share_bytes=at.kept)
    assert found.seconds == pytest.approx(optimum_s, rel=1e-3)


@pytest.mark.parametrize("bandwidth", [1.0, 5.0, 20.0])
@pytest.mark.parametrize("quick", [True, False])
def test_more_memory_takes_no_more_time(bandwidth: float, quick: bool) -> None:
    step = layered()
    at = [step.floor + share * (step.everything - step.floor) / 10 for share in range(1, 11)]
    found = [solve(step, machine(bandwidth), limit=m, share_bytes=math.inf, quick=quick).seconds for m in at]
    assert all(looser <= 1.005 * tighter for tighter, looser in itertools.pairwise(found)), found


def test_what_several_need_to_be_recomputed_is_computed_once() -> None:
    """Attention's result and its logsumexp, each of which takes the whole attention of 3 s again."""
    items = tuple(Item(10, 0, 0, 3, 3, recompute_s=3.5, choices=ALL) for _ in range(2))
    step = Step((1.0,) * 4, (0,) * 4, 2, items, shared=(Shared(3.0, (0, 1)),))
    assert step.own_again_s == [0.5, 0.5]
    assert step.fair_again_s == [2.0, 2.0]
    played = replay(step, [Choice.RECOMPUTE] * 2, Schedule(), machine(1.0))
    assert played.seconds == 8.0


def test_what_does_not_lower_the_peak_of_a_whole_step_stays() -> None:
    """The peak is that of the loss, 100 bytes, and two tensors are as large as half of that."""
    items = tuple(Item(25, i, i, 5 - i, 5 - i) for i in range(2))
    step = Step((1.0,) * 6, (0, 0, 0, 100, 0, 0), 3, items)
    kept, at = solve_for(step, 0.5, machine(1000.0), whole=True)
    assert (kept.peak, len(kept.schedule), at.kept) == (125, 1, math.inf)
    gone, at = solve_for(step, 0.0, machine(1000.0), whole=False)
    assert (len(gone.schedule), at.kept) == (2, 0)
    low_peak = Step((1.0,) * 6, (0, 0, 100, 100, 0, 0), 3, tuple(Item(25, i, i, 3, 3) for i in range(2)))
    stays, _ = solve_for(low_peak, Limits(150, math.inf), machine(1000.0), whole=True)
    assert not stays.schedule


def test_what_is_not_written_when_the_forward_ends_stays_unless_the_graph_is_a_whole_step() -> None:
    """Two tensors of 25 bytes, of which each takes 2.5 s to write. The peak is at the begin of the forward.

    Many such graphs may come before the first backward, and that of a whole step comes next.
    """
    items = tuple(Item(25, i, i, 5 - i, 5 - i) for i in range(2))
    step, slow = Step((1.0,) * 6, (300, 0, 0, 0, 0, 0), 3, items), machine(10.0)

    def found(budget: int | float | str, *, whole: bool = False) -> Replay:
        return solve_for(step, budget, slow, whole=whole)[0]

    assert (found(0).stays, found(0).write_stall_s) == (0, 3.0)
    assert (found(0.5).stays, found(0.5).write_stall_s) == (25, 0.5)
    assert (found(25).stays, found(25).write_stall_s) == (25, 0.5)
    assert found("auto").write_stall_s == found(0, whole=True).write_stall_s == 0.0
    assert found("auto").stays == found(0, whole=True).stays == 50


@pytest.mark.parametrize(
    ("higher", "seconds", "worth"), [(104, 89, True), (106, 50, False), (104, 91, False)], ids=["both", "peak", "time"]
)
def test_a_peak_that_is_hardly_higher_is_worth_a_tenth_of_the_time(higher: int, seconds: int, worth: bool) -> None:
    assert is_worth(100, 100, higher, seconds) is worth


def test_budget_0_takes_a_peak_that_is_hardly_higher_for_much_less_time() -> None:
    """At the floor of 100 bytes the tensor of 4 can only be loaded late, and its load takes 10 s."""
    step = Step((1.0,) * 6, (0, 0, 0, 100, 96, 0), 3, (Item(4, 0, 0, 4, 4),))
    slow = Machine(1.0, 1.0, write_bw=4.0, read_bw=0.4, latency_s=0.0)
    at_floor = solve(step, slow, limit=100, share_bytes=math.inf)
    found, at = solve_for(step, 0, slow, whole=True)
    assert at_floor.seconds > found.seconds
    assert 100 < at.memory <= 105


def test_a_share_is_of_the_range_from_the_floor_to_everything_kept() -> None:
    step = layered()
    least, most = step.floor, step.everything
    assert limits(step, 0.5, whole=True) == Limits(least + 0.5 * (most - least), math.inf)
    assert limits(step, 0.5).kept == limits(step, 0.5).stays == 0.5 * sum(item.nbytes for item in step.items)


def test_what_is_read_on_both_sides_of_the_loss_is_not_recomputed() -> None:
    """The logits are cheap per byte to compute again, and alive at the peak whatever becomes of them."""
    step, logits = layered(), LAYERS * PER_LAYER
    large = Item(200, logits, logits, logits + 2, logits + 2, 1.0, ALL)
    seconds = (*step.seconds[:logits], 1.0, 1.0, 2.0, *step.seconds[logits:])
    later = [replace(i, first_use=i.first_use + 3, last_bwd_use=i.last_bwd_use + 3) for i in step.items]
    whole = Step(seconds, (5,) * len(seconds), logits + 2, (*later, large))
    found = solve(whole, machine(0.1), limit=whole.floor + 60, share_bytes=math.inf, quick=True)
    assert found.choices[-1] is Choice.KEEP
    assert Choice.RECOMPUTE in found.choices
