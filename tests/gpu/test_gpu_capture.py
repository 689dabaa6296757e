"""Somebody captures a CUDA graph of their own while our threads work: the mode is CUDA's strictest, as PyTorch's is."""

from __future__ import annotations

import time

import torch

from tests.gpu.test_gpu_roundtrip import numbers, slow
from tests.runtime.harness import load, release, store

LONG_ENOUGH_S = 0.5  # the janitor wakes 50 ms after a death


def captured(while_capturing: object) -> None:
    """Captures a kernel, lets go of `while_capturing`, captures another, and replays both."""
    graph, y = torch.cuda.CUDAGraph(), torch.zeros(1024, device="cuda")
    held = [while_capturing]
    del while_capturing
    with torch.cuda.graph(graph, capture_error_mode="global"):
        y.add_(1)
        held.clear()
        time.sleep(LONG_ENOUGH_S)
        y.add_(2)
    y.zero_()
    graph.replay()
    assert y.eq(3).all()


def test_a_handle_dies_during_the_capture(config: str) -> None:
    """Its copy was begun, and nobody has asked for its end."""
    slow()
    handles = [store(numbers(k), config, k) for k in range(4)]
    captured(handles.pop())
    for k, handle in enumerate(handles):
        assert load(handle, numbers()).equal(numbers(k))


def test_a_released_handle_dies_during_the_capture(config: str) -> None:
    slow()
    x = numbers(5)
    handle = store(x, config)
    release(handle, x, hand_over=False)
    captured([handle, x])
