"""Pinned memory in large pieces: no two pieces share a byte, and what comes back is used again."""

import random

import pytest
import torch

from ssd_fx.runtime.memory.buffers import PAGE
from ssd_fx.runtime.memory.pinned import LEAST, MOST, Pinned

CPU = torch.device("cpu")


class Host:
    """What `Streams` has for pinned memory, on the CPU."""

    def __init__(self):
        self.pinned_bytes = []

    def pinned(self, nbytes):
        self.pinned_bytes.append(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8)


def test_no_two_pieces_share_a_byte():
    """Random sizes and lifetimes; each piece has a value of its own, which nobody else writes over."""
    drawn, host = random.Random(0), Host()
    pinned, living = Pinned(host, CPU), []
    for number in range(2_000):
        if living and drawn.random() < 0.5:
            value, piece = living.pop(drawn.randrange(len(living)))
            assert bool((piece.tensor == value).all())
            del piece
        piece = pinned.take(drawn.randrange(1, 20 * PAGE))
        piece.tensor.fill_(number % 251)
        living.append((number % 251, piece))
        living = living[-20:]
    assert all(bool((piece.tensor == value).all()) for value, piece in living)
    assert pinned.nbytes == sum(host.pinned_bytes) == LEAST


def test_what_comes_back_is_used_again():
    host = Host()
    pinned = Pinned(host, CPU)
    for _ in range(50):
        pieces = [pinned.take(LEAST // 4) for _ in range(4)]
        del pieces
    assert host.pinned_bytes == [LEAST]


def test_it_grows_with_the_need():
    """Each chunk is as large as all before, up to a bound; a tensor beyond that has one of its own, a power of two."""
    host = Host()
    pinned = Pinned(host, CPU)
    kept = [pinned.take(LEAST) for _ in range(6)]
    assert host.pinned_bytes == [LEAST, LEAST, 2 * LEAST, 4 * LEAST]
    kept.append(pinned.take(9 * LEAST))
    assert host.pinned_bytes[-1] == 16 * LEAST  # as PyTorch would round it up without a word
    assert MOST > 16 * LEAST
    kept.append(pinned.take(7 * LEAST))
    assert len(host.pinned_bytes) == 5, "the rest of a chunk serves others"


def test_no_memory_is_an_error_of_the_system():
    class Full:
        def pinned(self, nbytes):
            raise RuntimeError("out of memory")

    with pytest.raises(OSError, match="no pinned memory for a tensor of 100 B"):
        Pinned(Full(), CPU).take(100)
