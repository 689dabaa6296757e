"""Faults in what shares a storage, what of it is stored, and what is saved at all: `passes/alias/`, `passes/joint/`."""

from tests.planted.fault import Fault

FAULTS = (
    Fault(
        "writes_of_the_wrong_graph",
        "passes/alias/storages.py",
        "for node in partition.backward.graph.nodes for target in written(node)",
        "for node in partition.forward.graph.nodes for target in written(node)",
        "an input that the backward writes into is offloaded, and its owner misses the write",
        "tests/test_backward_effects.py",
    ),
    Fault(
        "namespace_of_collectives",
        "passes/alias/storages.py",
        'namespace == "_c10d_functional"',
        'namespace == "c10d_functional"',
        "a tensor is stored while a collective still writes it: wrong gradients",
        "tests/passes/test_collectives.py",
    ),
    Fault(
        "fake_implementations_are_trusted",
        "passes/alias/storages.py",
        "if key in given or made.count(key) > 1}",
        "if made.count(key) > 2}",
        "a custom operator's result and its argument are stored as one tensor: wrong gradients",
        "tests/test_untrue_fakes.py",
    ),
    Fault(
        "what_the_backward_returns_is_offloaded",
        "passes/alias/storages.py",
        "in facts.returned for n in saved",
        "in () for n in saved",
        "compiled autograd accumulates a gradient that is still being read: wrong gradients",
        "tests/loops/test_compiled_autograd.py",
    ),
    Fault(
        "row_of_the_storage_for_row_of_the_box",
        "passes/alias/packing.py",
        "(top - box.rows[0]) * box.width + left",
        "(top - box.rows[0]) * box.row + left",
        "columns of a storage are rebuilt from other columns: wrong gradients",
        "tests/passes/test_packing.py",
    ),
    Fault(
        "products_with_one_row",
        "passes/alias/packing.py",
        "statically_known_true(n > 1) for n in sizes",
        "statically_known_true(n >= 1) for n in sizes",
        "a product with a vector gets other strides, and other bits than without offloading",
        "tests/passes/test_packing.py::test_a_product_with_a_vector_keeps_its_strides",
    ),
    Fault(
        "cast_for_a_copy",
        "passes/alias/copies.py",
        "(out.dtype, out.device, out.shape) != (old.dtype, old.device, old.shape)",
        "(out.device, out.shape) != (old.device, old.shape)",
        "a cast is rebuilt as a copy of what it was computed from: other bits in the backward",
        "tests/passes/test_plans.py::test_what_was_filled_with_something_else_is_stored",
    ),
    Fault(
        "changed_inputs_by_their_metadata",
        "passes/joint/mutated_inputs.py",
        "if _is_in(n, changed) and not written(n)",
        "if storage_of(n) in changed and not written(n)",
        "the backward reads the new value of a buffer through a view: wrong gradients",
        "tests/test_recompute.py::test_the_backward_has_a_changed_input_as_it_was "
        "tests/test_recompute.py::test_statistics_that_change_within_a_checkpoint",
    ),
    Fault(
        "writes_inside_the_graph",
        "passes/partition.py",
        "for n in (*after, *inside) if n",
        "for n in after if n",
        "an input that an operator writes into is saved, and the backward reads its new values",
        "tests/test_recompute.py::test_the_backward_has_a_changed_input_as_it_was "
        "tests/test_recompute.py::test_what_depends_on_a_buffer_that_changes_is_not_recomputed",
    ),
    Fault(
        "operators_of_others_run_twice",
        "passes/joint/recompute.py",
        "not isinstance(target, torch._ops.OpOverload) or not is_silent(target)",
        "not isinstance(target, torch._ops.OpOverload)",
        "an operator with an effect, such as a counter or a collective, runs twice: wrong gradients, or a hang",
        "tests/test_recompute.py::test_what_may_talk_to_other_ranks_runs_once",
    ),
    Fault(
        "recomputed_from_what_the_caller_has",
        "passes/joint/recompute.py",
        "changed_inputs(partition.forward.graph) | (callers - slots.keys())",
        "changed_inputs(partition.forward.graph)",
        "a tensor is computed again from an input that the caller has changed meanwhile: wrong gradients",
        "tests/test_recompute.py::test_an_input_that_is_not_saved_has_no_price",
    ),
    Fault(
        "stale_views_of_another_layout",
        "passes/joint/stale_views.py",
        "return found if alike and {",
        "return found if {",
        "a view gets the strides of another tensor than the kernels have: wrong gradients",
        "tests/passes/test_rejoin.py",
    ),
)
