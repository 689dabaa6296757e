"""Faults in what is predicted and decided: `passes/planner/`, `passes/cost/`, `passes/proposals.py`."""

from tests.planted.fault import Fault

FAULTS = (
    Fault(
        "write_lane_forgets_what_is_queued",
        "passes/planner/simulate.py",
        "if self.free < now:",
        "if True:",
        "transfers are predicted to overlap, so plans promise steps that the drive cannot keep up with",
        "tests/passes/planner/test_simulate.py::test_every_wait_by_hand",
    ),
    Fault(
        "what_recomputing_needs_comes_late",
        "passes/planner/simulate.py",
        "min(firsts[needed], firsts[i])",
        "max(firsts[needed], firsts[i])",
        "a tensor is loaded after what is computed of it: predicted times and memory are wrong",
        "tests/passes/planner/test_simulate.py::test_what_recomputing_needs_is_there_as_early",
    ),
    Fault(
        "loads_paced_by_the_write_lane",
        "passes/planner/place.py",
        "self.margin * item.moved_nbytes / lanes.read_bw",
        "self.margin * item.moved_nbytes / lanes.write_bw",
        "loads begin too late on drives that read slower than they write: every backward stalls",
        "tests/passes/planner/test_planners.py::test_a_load_begins_twice_the_time_of_its_read_before_its_use",
    ),
    Fault(
        "window_never_gets_smaller",
        "passes/planner/place.py",
        "                ahead -= items[first].nbytes",
        "                pass",
        "after the first window of loads every load waits for its use: a backward of stalls",
        "tests/passes/planner/test_planners.py::test_a_load_has_the_window_as_soon_as_another_was_waited_for",
    ),
    Fault(
        "share_of_the_peak",
        "passes/planner/select.py",
        "budget * movable)",
        "budget * everything(step))",
        "a budget of a quarter keeps more than a quarter",
        "tests/passes/test_plans.py::test_a_share_is_a_share_of_the_saved_bytes",
    ),
    Fault(
        "collectives_of_the_backward",
        "passes/proposals.py",
        "if communication(partition) != communication(first.partition):",
        "if communication(partition)[0] != communication(first.partition)[0]:",
        "ranks run the collectives of their backwards in different orders: all ranks hang",
        "tests/passes/test_pipeline.py",
    ),
    Fault(
        "unknown_inputs_are_nobody_s",
        "passes/partition.py",
        "            return self._inputs\n",
        "            return []\n",
        "beside a tensor subclass, recomputing reads an input that the caller has changed: wrong gradients",
        "tests/test_recompute.py::test_what_the_caller_may_change_is_not_computed_from",
    ),
    Fault(
        "buffers_are_nobody_s",
        "passes/partition.py",
        " or n.name in self.untrained]",
        "]",
        "recomputing reads a buffer, a frozen parameter or an attribute that eager code has changed: wrong gradients",
        "tests/test_recompute.py::test_what_a_model_has_beside_its_weights_is_not_computed_from",
    ),
    Fault(
        "partition_that_reads_what_the_caller_has",
        "passes/proposals.py",
        "return partition if partition.shared_with_caller <= first.partition.shared_with_caller else None",
        "return partition",
        "recomputing reads an output that the caller has changed meanwhile: wrong gradients",
        "tests/passes/test_pipeline.py",
    ),
)
