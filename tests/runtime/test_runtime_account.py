"""What is held for the backward stays within the allowance, whatever the drive does; and what lives is counted."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ssd_fx.runtime import account
from ssd_fx.runtime.account import AUTO, limit_of
from ssd_fx.runtime.allowance import NOTHING, Allowance, Bound
from ssd_fx.runtime.config import parse
from ssd_fx.runtime.entries import lookup
from ssd_fx.runtime.memory import gauge as gauges
from ssd_fx.runtime.memory.cpu_allocator import CPU_ALLOCATOR
from ssd_fx.runtime.memory.gauge import CpuGauge, DeviceGauge, gauge
from ssd_fx.runtime.reader import Reader
from ssd_fx.runtime.states import Entry, Load, State
from ssd_fx.runtime.store import Store
from ssd_fx.runtime.stores import get_store
from tests.runtime.engines import DelayedEngine, around
from tests.runtime.harness import begin, config_json, load, raw, release, store

MIB = 1 << 20
N = MIB // 4  # numbers of a tensor of 1 MiB
CPU = torch.device("cpu")


@pytest.fixture
def allowed(monkeypatch: pytest.MonkeyPatch) -> list[Bound]:
    """What every forward is allowed: the last of the list."""
    bounds = [NOTHING]
    begins = Allowance.begins

    def choose(self: Allowance, *args: Any, **more: Any) -> None:
        begins(self, *args, **more)
        self.bounds = (bounds[-1],)

    monkeypatch.setattr(Allowance, "begins", choose)
    CPU_ALLOCATOR.install()
    return bounds


def at_most(nbytes: int) -> Bound:
    return Bound(nbytes, sys.maxsize, 0)


def forward(config: str, count: int = 6, graph: str = "g") -> tuple[list[torch.Tensor], list[int]]:
    """Handles of tensors that hold their number, and what is held behind each release."""
    begin(config, graph=graph, offloaded=count * MIB)
    handles, held = [], []
    for i in range(count):
        x = torch.full((N,), float(i))
        handles.append(store(x, config, slot=i, seq=2 * i, graph=graph))
        release(handles[-1], x, seq=2 * i + 1)
        held.append(get_store(config).writer.held_bytes)
    return handles, held


def backward(handles: list[torch.Tensor], found: Store, most: int) -> None:
    while handles:
        i = len(handles) - 1
        y = load(handles[i], torch.empty(N))
        assert raw(y) == raw(torch.full((N,), float(i)))
        del y, handles[i]
        assert found.writer.held_bytes <= most


@pytest.mark.parametrize("most", [0, MIB // 2, MIB, 3 * MIB, 1 << 40])
def test_no_more_is_held_than_is_allowed(tmp_path: Path, allowed: list[Bound], most: int) -> None:
    """On a drive whose writes end late and in any order. The second step knows which tensors have to leave."""
    allowed.append(at_most(most))
    config = config_json(tmp_path, around(DelayedEngine, "memory"), memory=1 << 40)
    for _ in range(3):
        handles, held = forward(config)
        assert max(held) <= most
        assert held[-1] == min(most, 6 * MIB) // MIB * MIB, "all is held that may be"
        backward(handles, get_store(config), most)


@pytest.mark.parametrize("order", [(5, 4, 3, 2, 1, 0), (0, 1, 2, 3, 4, 5), (2, 5, 0, 4, 1, 3)])
@pytest.mark.parametrize("consume", [True, False])
def test_the_backward_asks_in_any_order(
    tmp_path: Path, allowed: list[Bound], order: tuple[int, ...], consume: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The less is outstanding, the less may be held. What is asked for and is not held makes the oldest leave, before
    there is memory for what is read."""
    bound = Bound(MIB, 2 * MIB, 6 * MIB)
    allowed.append(bound)
    config = config_json(tmp_path, around(DelayedEngine), memory=1 << 40)
    writer, reads = get_store(config).writer, Reader.begin

    def begins(self: Reader, entry: Entry, *args: Any, **more: Any) -> Load:
        if entry.state is State.ON_DISK and not entry.ahead:
            assert writer.held_bytes <= bound.allowed(writer.outstanding_bytes)
        return reads(self, entry, *args, **more)

    monkeypatch.setattr(Reader, "begin", begins)
    for _ in range(2):
        handles, _ = forward(config)
        assert writer.held_bytes == 5 * MIB
        for i in order:
            y = load(handles[i], torch.empty(N), consume=consume)
            assert raw(y) == raw(torch.full((N,), float(i)))
            assert writer.held_bytes <= bound.allowed(writer.outstanding_bytes)
            del y
        del handles


def test_what_the_graph_still_uses_is_on_the_drive(tmp_path: Path, allowed: list[Bound]) -> None:
    """Such as a residual stream. It is no longer resident, so it makes no room for others."""
    bound = Bound(0, 3 * MIB // 2, 5 * MIB)
    allowed.append(bound)
    config = config_json(tmp_path, memory=1 << 40)
    begin(config, offloaded=5 * MIB)
    used = torch.zeros(N)
    handles = [store(used, config)]
    writer = get_store(config).writer
    for i in range(1, 5):
        x = torch.full((N,), float(i))
        handles.append(store(x, config, slot=i, seq=2 * i))
        release(handles[-1], x, seq=2 * i + 1)
        del x
        assert writer.held_bytes <= bound.allowed(writer.outstanding_bytes)


def test_what_is_copied_is_held_though_it_was_asked_for(tmp_path: Path, allowed: list[Bound]) -> None:
    """In other strides nothing is donated, so the tensor stays until its handle dies, and others have to leave."""
    bound = Bound(0, 2 * MIB, 6 * MIB)
    allowed.append(bound)
    config = config_json(tmp_path, memory=1 << 40)
    begin(config, offloaded=6 * MIB)
    handles = []
    for i in range(6):
        x = torch.full((N // 256, 256), float(i))
        handles.append(store(x, config, slot=i, seq=2 * i))
        release(handles[-1], x, seq=2 * i + 1)
        del x
    writer = get_store(config).writer
    assert writer.held_bytes == 4 * MIB
    for i in (5, 4, 3):
        y = load(handles[i], torch.empty(256, N // 256).t())
        assert torch.equal(y, torch.full_like(y, float(i)))
        assert writer.held_bytes <= bound.allowed(writer.outstanding_bytes)


def test_handles_that_die_on_the_drive(tmp_path: Path, allowed: list[Bound]) -> None:
    """Less is outstanding then, so less may be held."""
    bound = Bound(0, 2 * MIB, 6 * MIB)
    allowed.append(bound)
    config = config_json(tmp_path, memory=1 << 40)
    handles, _ = forward(config)
    assert [lookup(each).state.where for each in handles] == ["disk"] * 2 + ["memory"] * 4
    del handles[:2]
    writer = get_store(config).writer
    while handles:
        load(handles.pop(), torch.empty(N))
        assert writer.held_bytes <= bound.allowed(writer.outstanding_bytes)


def test_a_forward_that_is_allowed_less_waits_until_the_others_are_gone(tmp_path: Path, allowed: list[Bound]) -> None:
    config = config_json(tmp_path, memory=1 << 40)
    allowed.append(at_most(1 << 40))
    handles, _ = forward(config)
    assert [lookup(h).state.where for h in handles] == ["memory"] * 6
    allowed.append(at_most(2 * MIB))
    begin(config, offloaded=MIB)
    assert get_store(config).writer.held_bytes <= 2 * MIB
    assert [lookup(h).state for h in handles[:4]] == [State.ON_DISK] * 4, "the oldest leave first"
    backward(handles, get_store(config), 2 * MIB)


def test_reads_ahead_end_where_a_forward_is_allowed_less(tmp_path: Path, allowed: list[Bound]) -> None:
    """Two graphs: when the backward of the second ends, tensors of the first are read ahead. Then a third begins."""
    config = config_json(tmp_path, memory=1 << 40)
    for some in (NOTHING, at_most(4 * MIB)):
        allowed.append(NOTHING)
        runs = {graph: forward(config, 4, graph)[0] for graph in "ab"}
        account_ = get_store(config).account
        assert account_
        assert account_._allowance
        account_._allowance.bounds = (some,)
        for graph in "ba" if some is NOTHING else "b":
            while runs[graph]:
                load(runs[graph].pop(), torch.empty(N))
    found = get_store(config)
    assert found.ledger.ahead_bytes == 4 * MIB
    begin(config, graph="c", offloaded=MIB)
    assert (found.ledger.ahead_bytes, found.writer.held_bytes) == (0, 0)


def test_what_the_graph_still_uses_is_not_held_for_the_backward(tmp_path: Path, allowed: list[Bound]) -> None:
    config = config_json(tmp_path, memory=1 << 40)
    begin(config, offloaded=MIB)
    x = torch.full((N,), 1.0)
    handle = store(x, config)
    found = get_store(config)
    assert (found.writer.held_bytes, found.writer.outstanding_bytes) == (0, 0)
    allowed.append(at_most(1 << 40))
    begin(config, offloaded=MIB)
    y = torch.full((N,), 2.0)
    other = store(y, config, slot=1)
    assert (found.writer.held_bytes, found.writer.outstanding_bytes) == (0, 0)
    release(other, y)
    assert (found.writer.held_bytes, found.writer.outstanding_bytes) == (MIB, MIB)
    release(handle, x)
    assert found.writer.outstanding_bytes == 2 * MIB
    load(other, y)
    assert found.writer.outstanding_bytes == MIB
    del handle, other
    begin(config)
    assert (found.writer.held_bytes, found.writer.outstanding_bytes) == (0, 0)


def test_wrappers_have_no_memory_of_their_own() -> None:
    """PyTorch raises for whoever asks a functional tensor, or one in vmap, for its memory. Some live on in caches."""
    functional = torch._to_functional_tensor(torch.ones(4))
    found = []

    def look(batched: torch.Tensor) -> torch.Tensor:
        assert type(batched) is type(functional) is torch.Tensor
        found.append(CpuGauge().live_bytes())
        return batched

    torch.vmap(look)(torch.ones(4, 4))
    assert len(found) == 1


def test_what_lives_on_the_cpu() -> None:
    """Tensors of our allocator, however short they live, and others that are there at a look."""
    CPU_ALLOCATOR.install()
    found = CpuGauge()
    before = found.live_bytes()
    x = torch.empty(N)
    assert found.live_bytes() - before == MIB
    del x
    assert found.peak_bytes() - before >= MIB
    assert found.peak_bytes() == found.live_bytes()
    small = [torch.ones(1000) for _ in range(10)]
    leaf = torch.ones(1000, requires_grad=True)
    leaf.sum().backward()
    found.look_around(for_tensors=True)
    assert found.live_bytes() - before >= (len(small) + 2) * 4000
    assert gauge(CPU) is not None


def test_two_accounts_see_the_same_peak() -> None:
    """Two models under `memory` compute in turns, and the allocator begins its peak anew at each look."""
    CPU_ALLOCATOR.install()
    one, other = CpuGauge(), CpuGauge()
    before = one.begin()
    torch.empty(N)
    other.begin()
    assert one.peak_bytes() - before == MIB
    assert one.peak_bytes() == before


def test_without_the_allocator_nothing_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CPU_ALLOCATOR, "_library", None)
    assert gauge(CPU) is None


class Statistics:
    """Those of a device, as PyTorch has them."""

    def __init__(self) -> None:
        self.now = self.peak = self.inactive = self.made = self.gone = 0

    def lives(self, *nbytes: int) -> None:
        for each in nbytes:
            self.made += max(0, each - self.now)
            self.gone += max(0, self.now - each)
            self.now = each
            self.peak = max(self.peak, each)

    def memory_stats_as_nested_dict(self, device: torch.device) -> dict[str, Any]:
        inactive = {"all": {"current": self.inactive}}
        lives = {"current": self.now, "peak": self.peak, "allocated": self.made, "freed": self.gone}
        return {"allocated_bytes": {"all": lives}, "inactive_split_bytes": inactive}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> tuple[Statistics, DeviceGauge]:
    made = Statistics()
    made.lives(500, 100)
    monkeypatch.setattr(torch, "get_device_module", lambda _: made)
    return made, DeviceGauge(torch.device("cuda"))


def test_the_most_that_lived_on_a_device(device: tuple[Statistics, DeviceGauge]) -> None:
    """Its peak is never reset. As long as it has not risen, it is the most that may have lived."""
    made, found = device
    made.lives(*[200, 100] * 10)
    assert found.peak_bytes() == 500, "nothing is known of the time before"
    made.lives(600, 300)
    assert found.peak_bytes() == 600, "it rose"
    made.lives(350, 150)
    assert found.peak_bytes() == 350, "no more was made"
    made.lives(*[180, 120] * 20)
    assert found.peak_bytes() == 450, "150 at its begin, and 300 above that were seen"
    made.lives(*[180, 120] * 3)
    made.made = 180
    assert found.peak_bytes() == 420, "the user has reset what was made"
    made.made = 0
    assert found.peak_bytes() == 420, "nothing counts it"
    made.made = made.gone = 5000
    made.lives(1000, 900)
    assert found.peak_bytes() == 1000
    made.peak = made.now  # a user resets it
    made.lives(950)
    assert found.peak_bytes() == 950
    assert found.live_bytes() == 950
    made.lives(2000, 100)  # within a node of ours
    assert found.begin() == 100
    made.lives(150, 120)
    assert found.peak_bytes() == 150


@pytest.mark.parametrize(("share", "spare"), [(None, 650), (1.0, 650), (0.5, 500)])
def test_what_a_process_could_have_of_a_device(
    device: tuple[Statistics, DeviceGauge], share: float | None, spare: int
) -> None:
    """What is free and what it has reserved, within what the user allows it (`set_per_process_memory_fraction`)."""
    made: Any = device[0]
    made.mem_get_info, made.memory_reserved = lambda _: (400, 1000), lambda _: 250
    if share is not None:
        made.get_per_process_memory_fraction = lambda _: share
    assert device[1].spare_bytes() == spare


def test_what_a_device_s_allocator_cannot_use(device: tuple[Statistics, DeviceGauge]) -> None:
    """As it was when most lived."""
    made, found = device
    for lives, inactive in ((100, 70), (400, 30), (200, 90)):
        made.lives(lives)
        made.inactive = inactive
        found.peak_bytes()
    assert found.waste_bytes() == 30
    made.inactive = 50
    found.peak_bytes()
    assert found.waste_bytes() == 50


def test_what_the_option_stands_for() -> None:
    found: Any = SimpleNamespace(total_bytes=lambda: 1000, spare_bytes=lambda: 700, live_bytes=lambda: 100)
    gpu = torch.device("cuda")
    assert [limit_of(said, 2, found, gpu) for said in (24, 0.5, "auto")] == [24, 500, int(AUTO * 700)]
    assert [limit_of(said, 2, found, CPU) for said in (24, 0.5, "auto")] == [24, 250, int(AUTO * 400)]


def test_the_shell_s_limit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    CPU_ALLOCATOR.install()
    monkeypatch.setattr(gauges, "available_bytes", lambda: 100 * MIB)
    monkeypatch.setattr(gauges, "total_bytes", lambda: 1000 * MIB)
    monkeypatch.setattr(gauges, "data_bytes", lambda: 50 * MIB)
    found = CpuGauge()
    assert (found.total_bytes(), gauges.host_spare_bytes()) == (1000 * MIB, 100 * MIB)
    monkeypatch.setattr(gauges.resource, "getrlimit", lambda _: (80 * MIB, -1))
    assert (found.total_bytes(), gauges.host_spare_bytes()) == (80 * MIB, 30 * MIB)
    assert found.spare_bytes() == found.live_bytes() + 30 * MIB


def test_an_optimizer_s_step_is_noticed() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    account.Account("1", 1, int, int, print)
    before = account._optimizer_steps
    torch.optim.SGD([weight]).step()
    assert account._optimizer_steps == before + 1


def test_a_ctrl_c_while_the_first_account_is_made_leaves_the_hook_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    registered = []

    def register(hook: object) -> None:
        registered.append(hook)
        if len(registered) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(account, "register_optimizer_step_post_hook", register)
    monkeypatch.setattr(account, "_hooked", False)
    with pytest.raises(KeyboardInterrupt):
        account.Account("1", 1, int, int, print)
    for _ in range(2):
        account.Account("1", 1, int, int, print)
    assert len(registered) == 2


def test_the_config_takes_it() -> None:
    assert parse('{"memory":"auto"}').memory == "auto"
