"""Memory, rates and verdicts; what is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from projection.formulas import (
    StepIO,
    drives_bytes,
    endurance,
    kept_bytes,
    layer_bytes,
    memory,
    offloaded_bytes,
    project,
    recomputed_bytes,
    state_bytes,
)
from projection.scenario import Model, Parallelism, Scenario

from ssd_fx.hardware import MACHINES, Drive, Drives

MODEL = Model(layers=8, width=1024, heads=16, sequence=1024, vocabulary=1000)
DRIVE = Drive(name="toy", write_gbps=4, read_gbps=8, capacity_tb=1, tbw=100)
LINK = 1e6  # GB/s: in nobody's way


def scenario(**changed: Any) -> Scenario:
    machine = MACHINES["a100-40g"]
    base = Scenario(
        model=MODEL,
        parallelism=Parallelism(),
        batch=4,
        tflops=100,
        device=machine.device,
        drives=Drives(link_gbps=LINK, drive=DRIVE, count=2),
    )
    return dataclasses.replace(base, **changed)


@pytest.mark.parametrize(
    ("step_s", "hides", "share"),
    [(3.0, "forward", 1.0), (2.9, "half", 1.0), (2.0, "half", 1.0), (1.0, "no", 0.5)],
)
def test_where_writes_hide(step_s: float, hides: str, share: float) -> None:
    """8 GB for two drives of 4 GB/s: one second, which is a third of 3 s and half of 2 s."""
    traffic = StepIO(nbytes=8e9, forward_s=step_s / 3, step_s=step_s)
    drives = Drives(link_gbps=LINK, drive=DRIVE, count=2)
    assert (traffic.hides(drives), traffic.share(drives)) == (hides, share)


@pytest.mark.parametrize(("read_gbps", "needed"), [(8, (4, 6)), (2.5, (5, 6)), (1.5, (8, 8))])
def test_how_many_drives_are_needed(read_gbps: float, needed: tuple[int, int]) -> None:
    """16 GB/s are written within half the step of 1 s, 24 within its forward, and 12 read: drives of 4 GB/s."""
    drive = dataclasses.replace(DRIVE, read_gbps=read_gbps)
    traffic = StepIO(nbytes=8e9, forward_s=1 / 3, step_s=1.0)
    half, forward = traffic.drives_needed(drive)
    assert (half, forward) == needed
    enough, one_less = (Drives(link_gbps=LINK, drive=drive, count=count) for count in (half, half - 1))
    assert traffic.share(enough) == 1 > traffic.share(one_less)


def test_half_a_drive_has_half_of_everything() -> None:
    whole, half = (Drives(link_gbps=LINK, drive=DRIVE, count=count) for count in (1, 0.5))
    for name in ("write_bytes_s", "read_bytes_s", "rated_tb"):
        assert getattr(half, name) == getattr(whole, name) / 2
    assert drives_bytes(half) == drives_bytes(whole) / 2


def test_reads_may_be_what_is_too_slow() -> None:
    """Then writes do not hide either, though drives would take them all."""
    drives = Drives(link_gbps=LINK, drive=dataclasses.replace(DRIVE, read_gbps=1), count=2)
    traffic = StepIO(nbytes=8e9, forward_s=1, step_s=3)
    assert (traffic.share(drives), traffic.hides(drives)) == (0.5, "no")  # 4 GB/s needed, 2 there


def test_the_link_of_the_gpu_may_be_what_is_too_slow() -> None:
    """Eight drives of 4 GB/s behind a link of 8 GB/s, where 16 GB/s are needed."""
    traffic = StepIO(nbytes=8e9, forward_s=1 / 3, step_s=1.0)
    drives = Drives(drive=DRIVE, count=8, link_gbps=8)
    assert (traffic.share(drives), traffic.hides(drives)) == (0.5, "no")


def test_a_checkpoint_around_every_layer_keeps_inputs_and_computes_the_layers_again() -> None:
    """Inputs are 2*s*b*h bytes a layer in 16 bits, of 34*s*b*h. Without a head the step takes a third more."""
    sbh = MODEL.sequence * MODEL.width
    found = scenario(head=False)
    assert recomputed_bytes(found, 1) == (8 * 2 + 34) * sbh
    assert recomputed_bytes(scenario(head=False, parallelism=Parallelism(pp=4)), 1) == (4 * 2 * 2 + 34) * sbh
    projected = project(found)
    assert projected.recomputed_step_s == pytest.approx(4 / 3 * projected.traffic.step_s)
    with_head = project(scenario())
    assert with_head.recomputed_step_s - with_head.traffic.step_s == pytest.approx(projected.traffic.forward_s)


def test_drives_that_are_too_slow_wear_by_what_they_take() -> None:
    traffic = StepIO(nbytes=8e9, forward_s=1 / 3, step_s=1.0)
    found = endurance(traffic, Drives(link_gbps=LINK, drive=DRIVE, count=2), drive_usd=50)
    assert found.bytes_per_day == 4e9 * 86400
    assert found.rated_days == pytest.approx(200e12 / (4e9 * 86400))
    assert found.wear_usd_per_day == pytest.approx(100 / found.rated_days)


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4]), st.booleans(), st.integers(0, 3))
def test_the_largest_micro_batch_fits_and_one_more_does_not(tp: int, pp: int, sp: bool, zero: int) -> None:
    found = scenario(parallelism=Parallelism(tp=tp, pp=pp, dp=4, sp=sp, zero=zero))
    found = dataclasses.replace(found, drives=Drives(link_gbps=LINK, drive=DRIVE, count=1000))
    room, sizes = found.device.memory_gib * 2**30, memory(found)
    each = (
        (sizes.largest_batch_kept, kept_bytes),
        (sizes.largest_batch_offloaded, offloaded_bytes),
        (sizes.largest_batch_recomputed, recomputed_bytes),
    )
    for largest, nbytes in each:
        assert sizes.state_bytes + nbytes(found, largest) <= room
        assert sizes.state_bytes + nbytes(found, largest + 1) > room
    assert sizes.largest_drive_bytes == pytest.approx(kept_bytes(found, sizes.largest_batch_offloaded))


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_the_drives_hold_the_largest_micro_batch_and_no_more(share: float) -> None:
    found = scenario(drives=Drives(link_gbps=LINK, drive=dataclasses.replace(DRIVE, capacity_tb=0.01), count=2))
    sizes = memory(found, share)
    largest = sizes.largest_batch_offloaded
    assert sizes.drives_are_full
    assert sizes.largest_drive_bytes == pytest.approx(share * kept_bytes(found, largest))
    assert share * kept_bytes(found, largest) <= 2e10 < share * kept_bytes(found, largest + 1)


def test_what_drives_are_too_slow_for_stays_in_memory() -> None:
    """Drives of nearly no speed leave nearly all that is kept; half the speed leaves half of what passes."""
    found = scenario()
    kept, passing = kept_bytes(found, 1), offloaded_bytes(found, 1)
    assert offloaded_bytes(found, 1, 1e-9) == pytest.approx(kept)
    assert offloaded_bytes(found, 1, 0.5) == pytest.approx((kept + passing) / 2)
    drives = [dataclasses.replace(DRIVE, write_gbps=gbps, read_gbps=gbps) for gbps in (0.1, 1000)]
    slow, fast = (project(scenario(drives=Drives(link_gbps=LINK, drive=drive, count=1))) for drive in drives)
    assert slow.share < 1 == fast.share
    kept_all = slow.memory.largest_batch_kept
    assert kept_all <= slow.memory.largest_batch_offloaded < fast.memory.largest_batch_offloaded


def test_a_model_that_does_not_fit() -> None:
    large = dataclasses.replace(MODEL, layers=96, width=16384, heads=128)
    found = memory(scenario(model=large))
    assert (found.largest_batch_kept, found.largest_batch_offloaded) == (0, 0)


@pytest.mark.parametrize(("zero", "each"), [(0, 16), (1, 7), (2, 5.5), (3, 4)])
def test_state_bytes_a_parameter_under_zero(zero: int, each: float) -> None:
    """16 bytes under Adam in 16 bits: 12 of the optimizer, 2 of the gradient, 2 of the weight; here over 4 GPUs."""
    model = dataclasses.replace(MODEL, vocabulary=0)
    found = state_bytes(scenario(model=model, parallelism=Parallelism(dp=4, zero=zero)))
    assert found == each * 8 * 12 * 1024**2


def test_the_first_of_four_stages_holds_four_micro_batches() -> None:
    found = scenario(parallelism=Parallelism(pp=4), head=False)
    assert kept_bytes(found, 1) == 4 * 2 * layer_bytes(MODEL, Parallelism(), 1)


def test_rates_do_not_depend_on_the_micro_batch() -> None:
    one, four = (project(scenario(batch=batch)).traffic.write_bytes_s for batch in (1, 4))
    assert one == pytest.approx(four)


def test_few_heads_of_keys_are_copied_on_many_gpus() -> None:
    model = dataclasses.replace(MODEL, kv_heads=2, vocabulary=0)
    two, eight = (layer_bytes(model, Parallelism(tp=tp, sp=True), 1) for tp in (2, 8))
    copied = 1024 * 2 * 2 * 64  # tokens, two bytes, keys and values, a head's width
    assert eight == pytest.approx((two - copied) / 4 + copied)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: dataclasses.replace(MODEL, heads=3),
            r"heads=3 does not divide width=1024; right would be one of 1, 2",
        ),
        (lambda: dataclasses.replace(MODEL, kv_heads=3), "kv_heads=3 does not divide heads=16"),
        (lambda: scenario(parallelism=Parallelism(tp=5)), "tp=5 does not divide heads=16; right would be one of 1, 2"),
        (lambda: scenario(parallelism=Parallelism(pp=3)), "pp=3 does not divide layers=8"),
        (lambda: Drives(drive=DRIVE, count=0, link_gbps=1), "drives=0 is not possible"),
    ],
)
def test_bad_values_name_what_would_be_right(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
