"""Pinned memory in large pieces: no two pieces share a byte, and what comes back is used again."""

import errno
import random
from contextlib import nullcontext

import pytest
import torch

from ssd_fx.runtime import pause
from ssd_fx.runtime.memory import pinned as pinned_memory
from ssd_fx.runtime.memory.buffers import PAGE
from ssd_fx.runtime.memory.pinned import LEAST, MOST, SHARE, Pinned

CPU = torch.device("cpu")


class Host:
    """What `Streams` has for pinned memory, on the CPU."""

    def __init__(self):
        self.pinned_bytes = []

    def on(self, device):
        return nullcontext()

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
    """Each chunk is as large as all before, up to a bound, and a power of two; a larger tensor has one of its own."""
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
    class Full(Host):
        def pinned(self, nbytes):
            raise RuntimeError("out of memory")

    with pytest.raises(OSError, match="no pinned memory for 4096 B: out of memory"):
        Pinned(Full(), CPU).take(100)


def test_a_large_tensor_takes_what_it_asks_for(monkeypatch):
    monkeypatch.setattr(pinned_memory, "MOST", LEAST)
    host = Host()
    Pinned(host, CPU).take(5 * LEAST + 1)
    assert host.pinned_bytes == [5 * LEAST + PAGE]


def test_no_more_is_pinned_than_our_share(monkeypatch):
    """The kernel takes none of it back, and would kill a process that has no other memory."""
    free = 100 * LEAST
    host = Host()
    monkeypatch.setattr(pinned_memory, "pinned_bytes", lambda: sum(host.pinned_bytes))
    monkeypatch.setattr(pinned_memory, "available_bytes", lambda: free - sum(host.pinned_bytes))
    pinned, kept = Pinned(host, CPU, ranks=2), []

    def take_all():
        for _ in range(100):
            kept.append(pinned.take(LEAST))

    with pytest.raises(OSError, match="would be more pinned memory") as raised:
        take_all()
    assert raised.value.errno == errno.ENOMEM
    share = SHARE * (free + sum(host.pinned_bytes)) / 2  # the other rank has as much
    assert share - LEAST < sum(host.pinned_bytes) <= share
    kept.pop()
    pinned.take(LEAST)  # what comes back is used on


def test_after_a_failure_there_is_a_pause(monkeypatch):
    """The driver looks for pages for seconds before it gives up."""
    now, asked = [0.0], []

    class Full(Host):
        def pinned(self, nbytes):
            asked.append(nbytes)
            raise RuntimeError("out of memory")

    monkeypatch.setattr(pause.time, "monotonic", lambda: now[0])
    pinned = Pinned(Full(), CPU)
    for seconds, times in ((0, 1), (29, 1), (31, 2), (80, 2), (92, 3)):
        now[0] = seconds
        with pytest.raises(OSError, match="no pinned memory for 4096 B"):
            pinned.take(100)
        assert len(asked) == times


def test_what_came_back_serves_other_sizes():
    host = Host()
    pinned = Pinned(host, CPU)
    small = [pinned.take(PAGE) for _ in range(LEAST // PAGE)]
    del small
    pinned.take(LEAST)
    assert host.pinned_bytes == [LEAST]


def test_what_is_under_way_is_let_go_before_more_is_pinned():
    host, under_way = Host(), []
    pinned = Pinned(host, CPU, let_go=under_way.clear)
    for _ in range(5):
        under_way.append(pinned.take(LEAST))
    assert host.pinned_bytes == [LEAST]


def test_all_of_the_process_counts_and_none_that_is_gone():
    before = pinned_memory.pinned_bytes()
    one, other = Pinned(Host(), CPU), Pinned(Host(), CPU)
    held = one.take(PAGE), other.take(PAGE)
    assert pinned_memory.pinned_bytes() - before == 2 * LEAST
    del held, one, other
    assert pinned_memory.pinned_bytes() == before
