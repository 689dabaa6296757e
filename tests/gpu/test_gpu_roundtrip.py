"""The ops on CUDA tensors, bitwise, with kernels that are still queued when the ops are called.

`slow()` keeps the compute stream busy for some 50 ms: whatever does not wait for it sees the bytes from before.
Those that need no stream run on a machine without a GPU too (tests/test_gpu_tests.py), so that they are known to work.
"""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

import ssd_fx
from ssd_fx.runtime import entries, trace
from ssd_fx.runtime.device import device_trace, streams
from ssd_fx.runtime.states import State
from tests.runtime import harness
from tests.runtime.harness import load, release, start_load, store, wait

DEVICE = "cuda"
N = 1 << 20
DTYPES = [
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64),
]


def slow(cycles: int = 100_000_000) -> None:
    if DEVICE == "cuda":
        torch.cuda._sleep(cycles)


def numbers(start: int = 0, n: int = N) -> Tensor:
    return torch.arange(start, start + n, dtype=torch.float32, device=DEVICE)


def settle(handle: Tensor) -> None:
    """Waits until the write is over and the store has seen that, as it does in its next op."""
    entry = harness.settle(handle)
    with entries.GUARD.lock:
        entry.store.writer.reap()
    assert entry.state is State.ON_DISK


def put(values: Tensor, config: str, slot: int = 0) -> Tensor:
    """The handle of a copy of `values`, whose kernel is queued behind a slow one, released and dropped."""
    x = torch.empty_like(values)
    slow()
    x.copy_(values)
    handle = store(x, config, slot)
    release(handle, x)
    return handle


def same(y: Tensor, values: Tensor) -> bool:
    return torch.equal(y.cpu().contiguous().view(torch.uint8), values.cpu().contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 999, 3 * N + 7])
def test_round_trip(config: str, dtype: torch.dtype, n: int) -> None:
    generator = torch.Generator(DEVICE).manual_seed(n)
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (n * dtype.itemsize,), generator=generator, device=DEVICE)
    values = raw.to(torch.uint8).view(dtype)
    handle = put(values, config)
    settle(handle)
    assert same(load(handle, values), values)


def test_a_view_at_an_odd_place(config: str) -> None:
    base = numbers().to(torch.bfloat16)
    values = base[3 : N - 5]
    handle = store(values, config)
    release(handle, values)
    settle(handle)
    assert same(load(handle, values), values)


def test_other_strides(config: str) -> None:
    values = numbers().view(1024, -1)
    asked = values.t().contiguous().t()
    handle = put(values, config)
    settle(handle)
    y = load(handle, asked)
    assert y.stride() == asked.stride()
    assert torch.equal(y, values)


def test_several_streams(config: str) -> None:
    """Each stream stores and loads its own, all at a time."""
    side = [torch.cuda.Stream() for _ in range(3)]
    values = [numbers(1000 * i) for i in range(9)]
    torch.cuda.synchronize()
    handles = []
    for i, value in enumerate(values):
        with torch.cuda.stream(side[i % 3]):
            handles.append(put(value, config, i))
    for i in reversed(range(9)):
        with torch.cuda.stream(side[i % 3]):
            y = load(handles[i], values[i], consume=False)
            y += 1
            assert torch.equal(y, values[i] + 1)


def test_memory_is_reused_while_a_store_is_in_flight(config: str) -> None:
    values = numbers()
    handle = put(values, config)
    for _ in range(8):
        torch.empty_like(values).fill_(-1)
    settle(handle)
    assert same(load(handle, values), values)


def test_load_into_memory_whose_last_user_is_queued(config: str) -> None:
    values = numbers()
    handle = put(values, config)
    settle(handle)
    torch.cuda.synchronize()
    last_user = torch.empty_like(values)
    address = last_user.data_ptr()
    slow()
    last_user.fill_(-1)
    del last_user
    y = start_load(handle, values)
    assert y.data_ptr() == address
    assert same(wait(y, handle), values)


def test_given_away_while_being_written(config: str) -> None:
    values = numbers()
    handle = put(values, config)
    y = load(handle, values)
    assert same(y, values)
    y.fill_(-1)
    second = put(values + 1, config, 1)
    settle(second)
    assert same(load(second, values), values + 1)


def test_copied_while_being_written(config: str) -> None:
    """The owner overwrites its tensor right behind a load that took a copy."""
    values = numbers()
    x = torch.empty_like(values)
    slow()
    x.copy_(values)
    handle = store(x, config)
    y = load(handle, values, consume=False)
    x.fill_(-1)
    assert same(y, values)


def test_overwritten_behind_a_release_that_waits(config: str) -> None:
    values = numbers()
    x = values.clone()
    slow()
    handle = store(x, config)
    release(handle, x, hand_over=False)
    x.fill_(-1)
    assert same(load(handle, values), values)


def test_handles_die_in_flight(config: str) -> None:
    values = numbers()
    for i in range(20):
        put(values + i, config)
    assert entries.living() == []
    handle = put(values, config)
    settle(handle)
    assert same(load(handle, values), values)


def test_stored_memory_is_free_afterwards(config: str) -> None:
    values = numbers()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    handles = [put(values, config, i) for i in range(4)]
    for handle in handles:
        settle(handle)
    assert torch.cuda.memory_allocated() < before + values.nbytes  # the element of a handle takes some bytes


def test_a_child_of_a_fork_leaves_the_transfers_alone(config: str) -> None:
    """As the workers of a data loader do."""
    values = numbers()
    handle = put(values, config)
    child = os.fork()
    if child == 0:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    settle(handle)
    assert same(load(handle, values), values)


def test_nodes_have_the_device_s_times(config: str) -> None:
    """The trace has what ran between two of our nodes, not how long the host took to launch it."""
    put(numbers(), config)  # what is made once takes its time
    torch.cuda.synchronize()
    device_trace.clear()
    values = numbers()
    handle = store(values, config)
    slow()
    release(handle, values)
    stored, released = device_trace.events()
    assert 0.02 < released[4] - stored[5] < 1.0  # 50 ms of sleep
    on_host = trace.events()[-1]
    assert on_host[0] == "release"
    assert on_host[5] < released[4], "the host was there before the device"


def test_streams_of_torch() -> None:
    """What the fake device of the other tests stands for."""
    cuda, device = streams.CudaStreams(), torch.device("cuda", 0)
    x, pinned = numbers(), cuda.pinned(4 * N)
    assert pinned.is_pinned()
    view = cuda.view(x.data_ptr(), 4 * N, device)
    assert (view.data_ptr(), view.dtype, view.numel()) == (x.data_ptr(), torch.uint8, 4 * N)
    side = cuda.side(device)
    assert side.cuda_stream != cuda.current(device).cuda_stream
    slow()
    x += 1
    begun = cuda.record(cuda.current(device), timed=True)
    side.wait_event(begun)
    cuda.copy(side, pinned, view)
    ended = cuda.record(side, timed=True)
    assert not ended.query()  # 50 ms of sleep come first
    ended.synchronize()
    assert ended.query()
    assert begun.elapsed_time(ended) < 1000
    assert torch.equal(pinned.view(torch.float32), numbers(1).cpu())


def test_counts(config: str) -> None:
    values = numbers()
    ssd_fx.reset_stats()
    handle = put(values, config)
    settle(handle)
    load(handle, values)
    seen = ssd_fx.stats()
    assert (seen.written_bytes, seen.read_bytes, seen.forwarded_bytes) == (4 * N, 4 * N, 0)
