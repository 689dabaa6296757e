"""Faults in where bytes go: `runtime/engines/`."""

from tests.planted.fault import Fault

FAULTS = (
    Fault(
        "padding_of_other_tensors",
        "runtime/engines/posix.py",
        "        ctypes.memset(bounce.address + nbytes, 0, padded - nbytes)  # no",
        "        # no",
        "bytes of other tensors of the process go to the drive",
        "tests/runtime/test_runtime_roundtrip.py::test_padding_on_disk_is_zero",
    ),
    Fault(
        "tail_kept_from_a_gpu",
        "runtime/engines/posix.py",
        '(tail and memory.reader.type == "cuda")',
        '(tail and memory.device.type == "cuda")',
        "what moved on from host memory cannot be loaded to its GPU: the step fails",
        "tests/runtime/test_runtime_moved.py::test_it_comes_back_whole",
    ),
    Fault(
        "cancelled_only_if_all_are",
        "runtime/engines/striped.py",
        "return any(cut_short)",
        "return all(cut_short)",
        "a tensor of which only some stripes were written passes for written: wrong gradients",
        "tests/runtime/test_runtime_striped.py::test_cancelled_when_only_some_parts_were_done",
    ),
    Fault(
        "failed_move_keeps_its_room",
        "runtime/engines/tiered.py",
        "finally:  # its warning may be an error\n                self._drive.free(drive)",
        "finally:\n                pass",
        "each write that fails on the way from host memory leaves a hole in the file",
        "tests/runtime/test_runtime_tiered.py::test_a_move_that_failed_gives_its_room_back",
    ),
    Fault(
        "room_on_the_gpus_file_for_the_host",
        "runtime/engines/gds.py",
        "extent.nbytes)\n        self._file.backing.free(extent.offset, extent.size)",
        "extent.nbytes)",
        "each tensor of the CPU leaves a hole in the file of the GPU's tensors",
        "tests/runtime/test_runtime_gds.py::test_cpu_tensors_go_through_posix",
    ),
    Fault(
        "reserve_of_a_full_drive",
        "runtime/engines/extents.py",
        "status.f_frsize - min(status",
        "status.f_frsize - max(status",
        "a drive of 1 TB with 40 GB free takes nothing",
        "tests/runtime/test_runtime_extents.py::test_a_twentieth_of_the_drive_is_left_and_at_most_a_gib",
    ),
    Fault(
        "stale_end_of_a_free_extent",
        "runtime/memory/free_extents.py",
        "if before is not None and before + self._lengths.get(before, -1) == offset:",
        "if before is not None:",
        "after a Ctrl-C the bytes of a living tensor are given to another one: wrong gradients",
        "tests/runtime/test_runtime_extents.py::test_ctrl_c_anywhere_never_hands_out_bytes_twice",
    ),
    Fault(
        "host_fills_what_a_copy_still_fills",
        "runtime/engines/memory.py",
        "by_host = memory.home is not None",
        "by_host = False",
        "a copy in vain writes over a tensor that has moved on to the same host memory: wrong gradients",
        "tests/runtime/test_runtime_tiered.py::test_no_tensor_moves_on_to_memory_that_a_copy_in_vain_still_fills",
    ),
    Fault(
        "host_s_time_is_the_device_s",
        "ssd_fx/calibration/transfers.py",
        "if streams.of(self.device):\n            with streams.timed(self.device):",
        "if False:\n            with streams.timed(self.device):",
        'transfers of a GPU seem to slow its kernels: plans recompute, and "auto" offloads what is waited for',
        "tests/test_calibrate.py::test_what_the_host_does_costs_a_device_nothing",
    ),
)
