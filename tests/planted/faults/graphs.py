"""Faults in the graphs, the generated code and what checks both: `passes/rewrite/`, `lowering/`, `verify/`."""

from tests.planted.fault import Fault

FAULTS = (
    Fault(
        "offset_of_the_loaded_tensor",
        "passes/rewrite/rebuild.py",
        "*sizes.of([wanted.offset]))",
        "*sizes.of([held.offset]))",
        "every view is rebuilt from the first bytes of what was loaded: wrong gradients",
        "tests/passes/test_insert.py::test_views_are_replayed_behind_the_wait",
    ),
    Fault(
        "copy_made_at_its_last_use",
        "passes/rewrite/backward.py",
        "found[copy] = min(first, found.get(copy, first))",
        "found[copy] = max(first, found.get(copy, first))",
        "a copy of a copy is made before the copy that it is made of: no such graph compiles",
        "tests/passes/test_plans.py::test_copies_that_are_all_saved "
        "tests/passes/test_insert.py::test_gradients_are_bitwise_those_of_everything_kept[saved_copies-late]",
    ),
    Fault(
        "copies_rely_on_no_strides",
        "passes/rewrite/backward.py",
        "rebuilt = any(m.copy for m in group.members)",
        "rebuilt = False",
        "where an operator returns other strides than promised, a copy is rebuilt with other bits",
        "tests/test_metadata.py::test_members_of_what_the_kernel_returned",
    ),
    Fault(
        "blocking_for_strict",
        "passes/rewrite/backward.py",
        "strict = self.plan.points[group.slot].strict",
        "strict = self.plan.points[group.slot].block",
        "the runtime reads tensors early for which the budget has no memory",
        "tests/passes/test_insert.py::test_the_nodes_say_what_the_plan_says_of_waiting",
    ),
    Fault(
        "stand_ins_pass_for_activations",
        "passes/rewrite/refuse.py",
        "return node.name in (partition.activations or ())",
        "return node.name not in (partition.activations or ())",
        "a checkpoint that compiles another graph computes gradients from stand-ins without values",
        "tests/passes/test_insert.py::test_a_backward_refuses_stand_ins_for_all_that_changes_from_step_to_step",
    ),
    Fault(
        "handed_over_although_it_is_read",
        "passes/lowering/inductor.py",
        "last = name in current.last_usage and not V.graph.cpp_wrapper",
        "last = not V.graph.cpp_wrapper",
        "a kernel reads a buffer whose memory is gone: wrong values or a crash",
        "tests/passes/test_audit.py "
        "tests/passes/test_order.py::test_what_is_read_by_a_kernel_a_little_behind_is_handed_over_behind_it",
    ),
    Fault(
        "readers_not_tied_to_their_wait",
        "passes/lowering/order.py",
        "    graph.add_edges_from(_readers_of_waits(nodes))\n",
        "",
        "a kernel reads a loaded tensor before its bytes are there: wrong gradients",
        "tests/passes/test_order.py::test_a_kernel_that_was_split_to_be_fused_runs_behind_its_wait",
    ),
    Fault(
        "order_ends_at_a_dropped_kernel",
        "passes/lowering/order.py",
        "before = [*before, node] if _may_be_replaced(node) else [node]",
        "before = [node]",
        "behind a kernel that Inductor drops the planned order is lost: more memory than planned",
        "tests/passes/test_order.py::test_a_kernel_that_may_go_takes_no_order_with_it",
    ),
    Fault(
        "audit_forgets_what_was_handed_over",
        "passes/lowering/audit.py",
        "                self.handed_over.add(name)",
        "                pass",
        "code that reads a tensor after its memory was given away is not refused",
        "tests/passes/test_audit.py::test_faults_in_the_code",
    ),
    Fault(
        "writes_checked_from_the_release_on",
        "passes/verify/graphs.py",
        "_writes(user, alias) and position[user] > position[store]",
        "_writes(user, alias) and position[user] > position[release]",
        "a tensor that is changed while it is being written is not refused: wrong gradients",
        "tests/passes/test_verify.py::test_graphs",
    ),
    Fault(
        "wait_checked_against_the_last_use",
        "passes/verify/plan.py",
        "points.wait_before <= life.first_bwd_use",
        "points.wait_before <= life.last_bwd_use",
        "a plan that uses a tensor before its wait is not refused",
        "tests/passes/test_verify.py::test_a_wait_between_the_first_use_and_the_last",
    ),
)
