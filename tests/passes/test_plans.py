"""The plan of every toy, exactly."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline

from tests.passes import toys
from tests.unlike import OTHER_BACKWARD, OTHER_NAMES


def check(toy: toys.Toy, expected: str, **changes: object) -> None:
    assert_expected_inline(toys.planned(toy, **changes).table.strip("\n"), expected, skip=1)


def test_relu_chain() -> None:
    check(toys.relu_chain, """relu  256 B  offload  store>relu release>t_2 load<threshold_backward wait<mm_2  [relu]""")


def test_shared_view_is_stored_once() -> None:
    check(toys.shared_view, """relu  256 B  offload  store>relu release>t_4 load<expand wait<mm_3  [relu]""")


def test_equal_products_are_one() -> None:
    check(toys.equal_products, """mm  256 B  offload  store>mm release>t_6 load<expand wait<mm_4  [mm]""")


def test_views_only_store_their_base() -> None:
    check(
        toys.views_only,
        """\
cat   768 B  offload  store>cat release>t_7 load<expand wait<mm_8   [t_7]
mm    768 B  offload  store>mm release>t_7 load<expand wait<mm_4    [t_2, t_3, t_4]
mm_1  256 B  offload  store>mm_1 release>t_7 load<expand wait<mm_3  [t_1]""",
    )


def test_non_contiguous() -> None:
    check(
        toys.non_contiguous, """sigmoid  256 B  offload  store>sigmoid release>t_5 load<expand wait<mm_2  [sigmoid]"""
    )


def test_tied_weight_is_never_stored() -> None:
    check(toys.tied_weight, """tanh  256 B  offload  store>tanh release>t_5 load<expand wait<mm_2  [tanh]""")


def test_an_output_is_never_stored() -> None:
    check(toys.saved_output, """""")


def test_nor_is_what_a_view_of_it_is_returned() -> None:
    check(toys.view_of_output, """""")


def test_in_place() -> None:
    check(
        toys.in_place,
        """\
relu  256 B  offload  store>relu release>t_3 load<expand wait<mul_2  [relu]
mm_1  256 B  offload  store>mm_1 release>t_3 load<expand wait<add    [mm_1]""",
    )


@OTHER_BACKWARD
def test_multi_output() -> None:
    check(
        toys.multi_output,
        """\
mm         256 B  offload  store>mm release>getitem_2 load<native_layer_norm_backward wait<native_layer_norm_backward  [mm]
getitem_1   32 B  offload  store>getitem_2 release>t_6 load<new_zeros wait<native_layer_norm_backward                  [getitem_1]
getitem_2   32 B  offload  store>getitem_2 release>t_6 load<scatter wait<native_layer_norm_backward                    [getitem_2]
getitem_3  128 B  offload  store>getitem_4 release>t_6 load<expand wait<mm_2                                           [getitem_3]
getitem_4  256 B  offload  store>getitem_4 release>t_6 load<new_zeros wait<scatter                                     [getitem_4]
mm_1       256 B  offload  store>mm_1 release>t_6 load<expand wait<cos                                                 [mm_1]""",
    )


def test_expanded_stores_the_row() -> None:
    check(
        toys.expanded,
        """\
mm       256 B  offload  store>mm release>t_1 load<sum_3 wait<cos            [mm]
sigmoid   32 B  offload  store>sigmoid release>bmm load<expand_2 wait<bmm_1  [sigmoid]
sin      256 B  offload  store>sin release>sum_2 load<expand_2 wait<bmm_2    [sin]""",
    )


def test_another_dtype_is_stored_as_its_base() -> None:
    check(
        toys.dtype_view,
        """\
sigmoid  256 B  offload  store>sigmoid release>t_2 load<expand wait<bitwise_and  [detach_2, t, detach_3]""",
    )


def test_nor_does_its_width_matter() -> None:
    check(
        toys.wide_dtype_view,
        """\
sigmoid  256 B  offload  store>sigmoid release>t_4 load<expand wait<mul_3  [slice_1, t, detach_3]
sum_2      4 B  keep     scalar                                            [sum_2]""",
    )


def test_dropout() -> None:
    check(
        toys.dropout,
        """\
relu       256 B  offload  store>relu release>t_2 load<expand wait<threshold_backward                             [detach_1]
getitem    256 B  offload  store>getitem_1 release>t_2 load<expand wait<mm_2                                      [t]
getitem_1   64 B  offload  store>getitem_1 release>t_2 load<native_dropout_backward wait<native_dropout_backward  [getitem_1]""",
    )


def test_half_precision() -> None:
    check(
        toys.half_precision,
        """\
_to_copy    128 B  offload  store>_to_copy release>mm load<expand wait<mm_4   [t_5]
_to_copy_1  128 B  offload  store>_to_copy_1 release>mm_1 load<t_2 wait<mm_5  [t_6]
sigmoid     128 B  offload  store>sigmoid release>t_6 load<expand wait<mm_2   [sigmoid]""",
    )


def test_lazy_conjugates_are_stored_as_their_bytes() -> None:
    check(
        toys.complex_numbers,
        """\
complex_1  512 B  offload  store>complex_1 release>t_6 load<expand wait<mm_2  [_conj]
mm_1       512 B  offload  store>mm_1 release>t_6 load<expand wait<sgn        [mm_1]""",
    )


@OTHER_NAMES
def test_so_are_lazy_negatives() -> None:
    check(
        toys.lazy_negative,
        """\
complex_1  512 B  offload  store>complex_1 release>t_6 load<expand wait<mm_3  [_conj]
mm_2       512 B  offload  store>mm_2 release>t_6 load<expand wait<mul_1      [select]
clone      256 B  offload  store>clone release>t_6 load<expand wait<mul_2     [clone]""",
    )


def test_real_views_of_complex_numbers() -> None:
    check(
        toys.real_view,
        """\
complex_1  512 B  offload  store>complex_1 release>t_3 load<expand wait<mm_3  [view_as_real, _conj]
mm_2       512 B  offload  store>mm_2 release>t_3 load<expand wait<sgn        [mm_2]""",
    )


def test_float8() -> None:
    check(
        toys.float8,
        """\
_to_copy   64 B  offload  store>_to_copy release>sum_1 load<expand wait<_to_copy_1  [_to_copy]
mm_1      256 B  offload  store>mm_1 release>sum_1 load<expand wait<mul_2           [mm_1]""",
    )


def test_a_scalar_is_kept() -> None:
    check(
        toys.scalar,
        """\
exp     4 B  keep     scalar                                       [exp]
mm_1  256 B  offload  store>mm_1 release>t_1 load<expand wait<sin  [mm_1]""",
    )


def test_so_is_what_is_empty() -> None:
    check(
        toys.empty,
        """\
mm       256 B  offload  store>mm release>detach_1 load<expand wait<cos  [mm]
sigmoid    0 B  keep     empty                                           [t, detach_1]""",
    )


def test_saved_twice() -> None:
    check(toys.saved_twice, """relu  256 B  offload  store>relu release>t_3 load<expand wait<mm_2  [relu]""")


def test_items_of_a_tuple_of_views_are_members() -> None:
    check(
        toys.unbound,
        """\
cat  768 B  offload  store>cat release>t_1 load<expand_4 wait<mm_2   [t_1]
mm   768 B  offload  store>mm release>t_1 load<expand_4 wait<bmm_3   [transpose_3, transpose_5, transpose_6]
bmm  128 B  offload  store>bmm release>t_1 load<expand_4 wait<bmm_2  [transpose_2]""",
    )


def test_slices_that_claim_to_be_no_views() -> None:
    check(
        toys.unsafe_split,
        """\
cat   512 B  offload  store>cat release>t_5 load<cat_1 wait<mm_8     [t_5]
mm    512 B  offload  store>mm release>t_5 load<expand wait<mm_3     [t, t_2]
mm_1  256 B  offload  store>mm_1 release>t_5 load<expand wait<mul_1  [mm_1]
mm_2  256 B  offload  store>mm_2 release>t_5 load<expand wait<mul_2  [mm_2]""",
    )


def test_overlapping_windows_store_their_base() -> None:
    check(toys.overlapping, """relu  256 B  offload  store>relu release>t_2 load<expand wait<mm_2  [t, detach_1]""")


def test_views_of_an_input() -> None:
    check(
        toys.view_of_input,
        """\
relu  256 B  offload  store>relu release>t_1 load<expand wait<threshold_backward  [detach_1]""",
    )


def test_a_range_is_stored_where_it_lies() -> None:
    check(
        toys.narrow,
        """\
cat         2048 B  offload  store>cat release>t_2 load<expand wait<mm_4  [t_2]
mm   256 of 2048 B  offload  store>mm release>t_2 load<expand wait<mm_2   [t]""",
    )


@pytest.mark.parametrize("toy", [toys.slice_of_big_base, toys.slice_with_steps])
def test_columns_are_copied(toy: toys.Toy) -> None:
    check(
        toy,
        """\
cat         2048 B  offload  store>cat release>t_3 load<expand wait<mm_5  [t_3]
mm   256 of 2048 B  offload  store>mm release>t_3 load<expand wait<mm_2   [t]""",
    )


def test_neighbours_are_copied_together() -> None:
    check(
        toys.neighbouring_slices,
        """\
cat          2048 B  offload  store>cat release>t_7 load<expand wait<mm_8   [t_7]
mm    768 of 2048 B  offload  store>mm release>t_7 load<expand wait<mm_5    [t_3, t_4]
mm_1          256 B  offload  store>mm_1 release>t_7 load<expand wait<mm_3  [t_1]""",
    )


def test_distant_ones_are_not() -> None:
    check(
        toys.scattered_slices,
        """\
cat   2048 B  offload  store>cat release>t_5 load<expand wait<mm_8   [t_5]
mm    2048 B  offload  store>mm release>t_5 load<expand wait<mm_5    [t_2, t_3]
mm_1   256 B  offload  store>mm_1 release>t_5 load<expand wait<mm_3  [t]""",
    )


def test_a_slice_of_a_permuted_base() -> None:
    check(
        toys.slice_of_permuted,
        """sigmoid  256 of 2048 B  offload  store>sigmoid release>sigmoid load<expand wait<mm_3  [t_1]""",
    )


def test_a_copied_slice_is_released_before_its_base() -> None:
    check(
        toys.slice_and_living_base,
        """\
cat          2048 B  offload  store>cat release>t_3 load<expand wait<mm_5                 [t_3]
mm    256 of 2048 B  offload  store>mm release>t_3 load<expand wait<mm_2                  [t]
relu          256 B  offload  store>relu release>t_3 load<expand wait<threshold_backward  [detach_1]""",
    )


def test_a_slice_that_is_reduced_keeps_its_strides() -> None:
    check(
        toys.slice_that_is_reduced,
        """\
cat        2048 B  offload  store>cat release>t_1 load<expand wait<mm_2                              [t_1]
mm         2048 B  offload  store>mm release>t_1 load<expand wait<native_layer_norm_backward         [slice_1]
getitem_1    32 B  offload  store>getitem_2 release>t_1 load<expand wait<native_layer_norm_backward  [getitem_1]
getitem_2    32 B  offload  store>getitem_2 release>t_1 load<expand wait<native_layer_norm_backward  [getitem_2]
cos         256 B  offload  store>cos release>t_1 load<expand wait<mul                               [cos]""",
    )


def test_gaps_are_not_stored() -> None:
    check(toys.gaps, """copy  256 of 480 B  offload  store>copy release>copy load<expand wait<mm_2  [t_1]""")


def test_a_copy_is_stored_once() -> None:
    check(
        toys.equal_copy,
        """\
sigmoid  256 of 512 B  offload  store>sigmoid release>t_4 load<expand wait<mul_1  [sigmoid, t_1]""",
    )


def test_a_copy_of_a_copy_is_neither() -> None:
    check(
        toys.copy_of_copy,
        """\
sigmoid  256 of 512 B  offload  store>sigmoid release>t_6 load<expand wait<mul_1  [sigmoid, t_2]""",
    )


def test_copies_that_are_all_saved() -> None:
    check(
        toys.saved_copies,
        """\
sigmoid  256 of 768 B  offload  store>sigmoid release>add load<expand wait<mul_1  [sigmoid, t_6, t_4]
mm_1            256 B  offload  store>mm_1 release>mul load<cos wait<cos          [mm_1]
sin             256 B  offload  store>sin release>t_10 load<expand wait<mm_4      [t_2]
mm_2            256 B  offload  store>mm_2 release>t_10 load<expand wait<mm_5     [t_3]""",
    )


def test_what_was_filled_with_a_copy() -> None:
    check(
        toys.filled,
        """sigmoid  256 of 1024 B  offload  store>sigmoid release>add_2 load<expand wait<mul_1  [sigmoid, t_7, t_4, t_2]""",
    )


def test_what_was_filled_with_something_else_is_stored() -> None:
    check(
        toys.widened,
        """\
sigmoid   256 B  offload  store>sigmoid release>add_1 load<_to_copy_1 wait<mul_1  [sigmoid]
copy      256 B  offload  store>copy release>mul load<_to_copy_3 wait<mm_5        [t_4]
copy_1    512 B  offload  store>copy_1 release>t_6 load<_to_copy_1 wait<mm_3      [t_1]
_to_copy  512 B  offload  store>_to_copy release>t_6 load<_to_copy_1 wait<mm_4    [t_2]""",
    )


def test_a_copy_of_a_changed_copy_is_stored() -> None:
    check(
        toys.written_between,
        """\
sigmoid  256 B  offload  store>sigmoid release>t_8 load<expand wait<mul_2  [sigmoid]
clone_1  256 B  offload  store>clone_1 release>t_8 load<expand wait<mm_2   [t_3]""",
    )


def test_a_changed_copy_is_stored() -> None:
    check(
        toys.changed_copy,
        """\
sigmoid  256 B  offload  store>sigmoid release>t_6 load<expand wait<mul_2  [sigmoid]
mul      256 B  offload  store>mul release>t_6 load<expand wait<mm_2       [t_2]""",
    )


@OTHER_BACKWARD
def test_small_ones_are_kept() -> None:
    check(
        toys.multi_output,
        """\
mm         256 B  offload  store>mm release>getitem_2 load<native_layer_norm_backward wait<native_layer_norm_backward  [mm]
getitem_1   32 B  keep     below min_bytes                                                                             [getitem_1]
getitem_2   32 B  keep     below min_bytes                                                                             [getitem_2]
getitem_3  128 B  offload  store>getitem_4 release>t_6 load<expand wait<mm_2                                           [getitem_3]
getitem_4  256 B  offload  store>getitem_4 release>t_6 load<new_zeros wait<scatter                                     [getitem_4]
mm_1       256 B  offload  store>mm_1 release>t_6 load<expand wait<cos                                                 [mm_1]""",
        min_bytes=100,
    )


def test_a_budget_keeps_what_idles_least() -> None:
    check(
        toys.multi_output,
        """\
mm         256 B  offload  store>mm release>t_6 load<new_zeros wait<native_layer_norm_backward       [mm]
getitem_1   32 B  offload  store>getitem_2 release>t_6 load<scatter wait<native_layer_norm_backward  [getitem_1]
getitem_2   32 B  keep     within the budget                                                         [getitem_2]
getitem_3  128 B  keep     within the budget                                                         [getitem_3]
getitem_4  256 B  keep     within the budget                                                         [getitem_4]
mm_1       256 B  keep     within the budget                                                         [mm_1]""",
        budget=0.7,
    )


@pytest.mark.parametrize("budget", [0.0, 0.25, 0.5, 1.0])
def test_a_share_is_a_share_of_the_saved_bytes(budget: float) -> None:
    plan = toys.planned(toys.multi_output, budget=budget).plan
    assert plan.saved_bytes - plan.offloaded_bytes <= budget * plan.saved_bytes
    largest = max((g.nbytes for g in plan.offloaded), default=0)
    assert plan.saved_bytes - plan.offloaded_bytes + largest >= budget * plan.saved_bytes


def fused_reader(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The gradient of sin is the last to read mm_1, and is computed with the first, that of sigmoid: both read `g`."""
    y = x @ w
    return (y @ w).sin() + (((y @ w.t()).cos() @ w).tanh() @ w).sigmoid()


def test_a_load_is_due_where_its_reader_is_fused_into() -> None:
    check(
        fused_reader,
        """\
mm       256 B  offload  store>mm release>mm_4 load<sin_1 wait<mm_9                              [mm]
mm_1     256 B  offload  store>cos release>t_11 load<sigmoid_backward wait<t_1                   [mm_1]
mm_2     256 B  offload  store>mm_2 release>mm_4 load<sin_1 wait<sin_1                           [mm_2]
cos      256 B  offload  store>cos release>t_11 load<sigmoid_backward wait<mm_7                  [t_3]
tanh     256 B  offload  store>sigmoid release>t_11 load<sigmoid_backward wait<mm_5              [tanh]
sigmoid  256 B  offload  store>sigmoid release>t_11 load<sigmoid_backward wait<sigmoid_backward  [detach_2]""",
    )
