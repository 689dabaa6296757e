"""Counts of what the runtime did since the last reset: for each graph, and summed for the process."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from ssd_fx.runtime.engines import extents
from ssd_fx.runtime.step_clock import StepClock
from ssd_fx.runtime.wear import DAY_S, rated_days, wear

CHECKPOINT = "checkpoint"  # the graph of a call of `ssd_fx.checkpoint`; its number among the calls that store follows


@dataclass(slots=True, kw_only=True)
class GraphStats:
    """Bytes, seconds and counts, summed over the runs of one graph.

    Attributes:
        steps: forwards of the graph. A graph for a block may run several times in a training step.
        stores: tensors that were to be stored.
        loads: tensors that the backward asked for.
        saved_bytes: what the plan saves, counted at the start of each forward.
        offloaded_bytes: of these, what the plan offloads.
        written_bytes: writes that succeeded, to drives and to host memory.
        drive_bytes: of these, what went straight to drives.
        read_bytes: reads that succeeded.
        forwarded_bytes: loads served from memory.
        freed_bytes: stored tensors whose memory was really freed, seen when they are loaded or their handle dies.
        kept_bytes: tensors that stay in memory because storing them failed.
        cancelled_bytes: writes ended early because they were no longer needed.
        wasted_bytes: written although somebody else held the tensor until it was loaded or its handle died.
        held_bytes: not written, because somebody else is known to hold the slot's tensors or the tensor is a leaf.
        prefetched_bytes: reads that began before the graph asked.
        encoded_from_bytes: before compression.
        encoded_to_bytes: after compression.
        encoding_error: the largest relative error (root mean square) of a lossy codec, measured at the first tensor of
            each slot.
        stall_s: seconds that operators waited for I/O. Waits of a device alone are sampled: the first 16 runs are
            timed, and then one in 16, which counts for all of them.
    """

    steps: int = 0
    stores: int = 0
    loads: int = 0
    saved_bytes: int = 0
    offloaded_bytes: int = 0
    written_bytes: int = 0
    drive_bytes: int = 0
    read_bytes: int = 0
    forwarded_bytes: int = 0
    freed_bytes: int = 0
    kept_bytes: int = 0
    cancelled_bytes: int = 0
    wasted_bytes: int = 0
    held_bytes: int = 0
    prefetched_bytes: int = 0
    encoded_from_bytes: int = 0
    encoded_to_bytes: int = 0
    encoding_error: float = 0.0
    stall_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class Stats(GraphStats):
    """The sums over all graphs, as in `GraphStats`, and the state of the process. Printed, it is a table.

    Attributes:
        steps: training steps. One begins with the first forward after a backward, whatever number of graphs it runs.
        memory_limit_bytes: what the option `memory` allows all tensors of the device; 0 without it.
        memory_peak_bytes: the most that all tensors had in the last step that ended, under that option.
        memory_stay_bytes: the most that stayed for the backward in that step.
        disk_bytes: the size of the files.
        moved_bytes: written to drives later, when host memory was full.
        drive_bytes_s: what drives get in a second at the present speed, over up to 16 steps; 0 before the third step.
            Steps that compile are not among them.
        step_s: mean seconds of a step, over the same steps, with all that the training loop does besides.
        drive_tbw: rated endurance of the drives in 10^12 bytes, this rank's share of the option of the last
            compilation; 0 if it is not known.
        compiled_graphs: how often the backend was called; a reset does not change it.
        compiled_since_reset: the same since the last reset.
        whole_graphs: of `compiled_graphs`, those that keep everything whatever their plan would be, as in a checkpoint
            or on several streams. Nothing of them is counted. `whole_why` is the reason of the last one.
        graphs: each graph that ran, by its name.
    """

    memory_limit_bytes: int = 0
    memory_peak_bytes: int = 0
    memory_stay_bytes: int = 0
    disk_bytes: int = 0
    moved_bytes: int = 0
    drive_bytes_s: float = 0.0
    step_s: float = 0.0
    drive_tbw: float = 0.0
    compiled_graphs: int = 0
    compiled_since_reset: int = 0
    whole_graphs: int = 0
    whole_why: str = ""
    graphs: dict[str, GraphStats] = field(default_factory=dict)

    @property
    def drive_tb_per_day(self) -> float:
        """10^12 bytes a day at the present speed, day and night."""
        return self.drive_bytes_s * DAY_S / 1e12

    @property
    def drive_life_days(self) -> float:
        """Days until the rated endurance of new drives is written at the present speed; 0 if that is not known."""
        return rated_days(self.drive_tbw, self.drive_bytes_s) if self.drive_bytes_s else 0.0

    def as_dict(self) -> dict[str, float]:
        """All figures of the process as numbers, for loggers: flat, and with the same keys at any time.

        Totals since the last reset are totals here too. Bytes per step are these over `steps`.
        """
        names = [f.name for f in dataclasses.fields(self) if f.type in (int, float)]
        derived = {"drive_tb_per_day": self.drive_tb_per_day, "drive_life_days": self.drive_life_days}
        return {name: getattr(self, name) for name in names} | {"running_graphs": len(self.graphs)} | derived

    def __str__(self) -> str:
        """A table of the bytes per step, or the likely reason if nothing ran. `repr` has every field of every graph."""
        return _table(self)

    def nothing_ran(self) -> str:
        """The likely reason why no graph ran."""
        if not self.whole_graphs:
            return _idle(self)
        if self.whole_graphs == self.compiled_graphs:
            return f"nothing is counted: {_whole(self)}"
        return f"{_idle(self)}; or what runs is not counted: {_whole(self)}"


@dataclass(slots=True, kw_only=True)
class SlotStats:
    """Bytes of one alias group, as in `GraphStats`, and seconds that operators waited for it.

    Attributes:
        why: the last reason for `kept` or `held`, if there is one.
        write_stall_s: for room to write it, and for its writes.
        read_stall_s: for its reads.
    """

    freed: int = 0
    wasted: int = 0
    held: int = 0
    kept: int = 0
    why: str = ""
    write_stall_s: float = 0.0
    read_stall_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class Counters(GraphStats):
    """The counts of one graph: a fold over its nodes, its transfers, and what became of its tensors' memory."""

    slots: dict[int, SlotStats] = field(default_factory=dict)

    def begin(self, saved_bytes: int, offloaded_bytes: int) -> None:
        """Counts a forward that starts."""
        _clock.begin(time.perf_counter(), _on_drives)
        self.steps += 1
        self.saved_bytes += saved_bytes
        self.offloaded_bytes += offloaded_bytes

    def written(self, nbytes: int, *, on_drive: bool) -> None:
        """Counts a write that ended well. `on_drive`: it went to a drive at once."""
        self.written_bytes += nbytes
        if on_drive:
            self.drive_bytes += nbytes

    def encoded(self, from_bytes: int, to_bytes: int, error: float) -> None:
        """Counts a tensor that was encoded. `error`: the relative error that was measured for its slot."""
        self.encoded_from_bytes += from_bytes
        self.encoded_to_bytes += to_bytes
        self.encoding_error = max(self.encoding_error, error)

    def count(self, what: Literal["freed", "wasted", "held", "kept"], slot: int, nbytes: int, why: str = "") -> None:
        """Counts what became of a tensor's memory, for the graph and for the tensor's slot."""
        setattr(self, f"{what}_bytes", getattr(self, f"{what}_bytes") + nbytes)
        found = self._slot(slot)
        setattr(found, what, getattr(found, what) + nbytes)
        found.why = why or found.why

    def waited(self, what: Literal["write", "read"], slot: int, seconds: float) -> None:
        """Counts seconds that an operator waited for a tensor, for the graph and for the tensor's slot."""
        self.stall_s += seconds
        if seconds:
            found = self._slot(slot)
            name = f"{what}_stall_s"
            setattr(found, name, getattr(found, name) + seconds)

    def _slot(self, slot: int) -> SlotStats:
        found = self.slots.get(slot)
        return found if found is not None else self.slots.setdefault(slot, SlotStats())


_SUMMED = [f.name for f in dataclasses.fields(GraphStats) if f.name not in ("steps", "encoding_error")]


_graphs: dict[str, Counters] = {}
_clock = StepClock()
_totals = Stats()
"""The counts that belong to no single graph."""


def counters(graph: str) -> Counters:
    """The counters of `graph`, made at its first node."""
    found = _graphs.get(graph)
    return found if found is not None else _graphs.setdefault(graph, Counters())


def _on_drives() -> int:
    """Bytes that drives got so far, of all graphs."""
    return _totals.moved_bytes + sum(c.drive_bytes for c in dict(_graphs).values())


def slots() -> dict[str, dict[int, SlotStats]]:
    """What became of every alias group that was stored: its memory, and what waited for it; by graph and slot."""
    return {name: dict(c.slots) for name, c in dict(_graphs).items()}


def turn() -> None:
    """Notes that a backward runs."""
    _clock.turn()


def step() -> int:
    """The number of the last forward's step, as in `StepClock`."""
    return _clock.step


def compiled(whole: str = "") -> None:
    """Counts a graph that the backend compiled. `whole`: why it keeps everything, whatever its plan would be."""
    _clock.compiled()
    _totals.compiled_graphs += 1
    _totals.compiled_since_reset += 1
    if whole:
        _totals.whole_graphs += 1
        _totals.whole_why = whole


def moved(nbytes: int) -> None:
    """Counts bytes that moved on from host memory to a drive."""
    _totals.moved_bytes += nbytes


def rated(drive_tbw: float) -> None:
    """Takes the rated endurance of the drives, in 10^12 bytes; 0 if it is not known."""
    _totals.drive_tbw = drive_tbw


def limited(limit: int, peak: int, stayed: int) -> None:
    """Takes the limit of memory, and two peaks of the last step: of all tensors, and of what stayed. All in bytes."""
    _totals.memory_limit_bytes = limit
    _totals.memory_peak_bytes = peak
    _totals.memory_stay_bytes = stayed


def stats() -> Stats:
    """Return a snapshot of all counts since the start or the last reset.

    A thread may take its one lock twice, so a signal handler may call it.
    """
    graphs, clock = dict(_graphs), _clock
    return dataclasses.replace(
        _totals,
        **{name: sum(getattr(c, name) for c in graphs.values()) for name in _SUMMED},
        steps=clock.steps,
        encoding_error=max((c.encoding_error for c in graphs.values()), default=0.0),
        disk_bytes=extents.disk_bytes(),
        drive_bytes_s=clock.bytes_s(),
        step_s=clock.step_s(),
        graphs={name: _snapshot(c) for name, c in graphs.items()},
    )


def reset_stats() -> None:
    """Set all counts to zero, but for `compiled_graphs` and `whole_graphs`."""
    global _clock, _totals
    kept = ("drive_tbw", "compiled_graphs", "whole_graphs", "whole_why")
    _totals = Stats(**{name: getattr(_totals, name) for name in kept})
    _graphs.clear()
    _clock = StepClock()


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Within, all counts are kept apart, and are dropped at the end."""
    global _graphs, _clock, _totals
    before = _graphs, _clock, _totals
    _graphs, _clock, _totals = {}, StepClock(), dataclasses.replace(_totals)
    try:
        yield
    finally:
        _graphs, _clock, _totals = before


def _snapshot(c: Counters) -> GraphStats:
    return GraphStats(**{f.name: getattr(c, f.name) for f in dataclasses.fields(GraphStats)})


_MEANING = {
    "saved": "by the forward for the backward",
    "offloaded": "of these, planned for the drive or host memory",
    "written": "to the drive or host memory",
    "drive": "of these, to the drive at once",
    "read": "back from there",
    "forwarded": "not read: still in memory when the backward asked",
    "freed": "stored, and no longer in memory when the backward asked",
    "kept": "in memory, because storing them failed",
    "cancelled": "writes ended early, because the backward asked",
    "wasted": "written in vain: somebody else held the tensor",
    "held": "not written: known to be held by somebody else",
    "prefetched": "of what was read, before the backward asked",
    "encoded_from": "before compression",
    "encoded_to": "after compression",
}
SKIPPED = (
    "a model with nn.LSTM, nn.GRU or nn.RNN (right would be to compile its other modules one by one, and "
    "ssd_fx.checkpoint around these), and of model.compile() the modules of torch itself, such as nn.Sequential, which "
    "torch.compile(model) takes"
)
_ALWAYS = ("saved", "offloaded", "written", "read", "forwarded", "freed")


def _table(stats: Stats) -> str:
    """The bytes per step, or the likely reason if nothing ran. Rows that are 0 are left out, but for `_ALWAYS`."""
    foot = f"on disk at the moment: {_mib(stats.disk_bytes).strip()}"
    if not stats.graphs:
        return f"{stats.nothing_ran()}\n{foot}"
    steps = max(stats.steps, 1)
    head = f"{stats.steps} steps, {len(stats.graphs)} graphs, {1e3 * stats.stall_s / steps:.1f} ms of stall per step"
    rows = []
    for name, meaning in _MEANING.items():
        nbytes = getattr(stats, f"{name}_bytes") / steps
        if name == "drive" and stats.drive_bytes == stats.written_bytes:
            continue  # it says nothing new
        if nbytes or name in _ALWAYS:
            rows.append(f"{name:14}{_mib(nbytes)}   {meaning}")
    life = []
    if stats.drive_bytes_s:
        daily, lasts = wear(stats.drive_tbw, stats.drive_bytes_s)
        life = [f"at this speed {daily} are written in a day; {lasts}"]
    whole = [f"not counted: {_whole(stats)}"] if stats.whole_graphs else []
    return "\n".join([f"{head}; bytes per step:", *rows, foot, *life, *whole])


def _idle(stats: Stats) -> str:
    if stats.compiled_since_reset:
        return (
            f"nothing ran since the start or the last reset_stats(): of the {stats.compiled_since_reset} graphs that "
            "ssd_fx was asked to compile since then none has begun a forward that saves activations for a backward, as "
            "none does under torch.no_grad(); TORCH_LOGS=recompiles,graph_breaks shows what runs instead"
        )
    since, also = " in this process", ""
    if stats.compiled_graphs:
        since, also = " since the last reset_stats()", f", and none of the {stats.compiled_graphs} graphs before ran"
    return (
        f"nothing ran: torch.compile has not called ssd_fx{since}{also}, so whatever trains does so uncompiled; "
        f"TORCH_LOGS=+dynamo names what Dynamo is 'skipping': {SKIPPED}"
    )


def _whole(stats: Stats) -> str:
    which = f"{stats.whole_graphs} of {stats.compiled_graphs} compiled graphs"
    return f"{which} run as without ssd_fx, and keep everything in memory: {stats.whole_why}"


def _mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:10.2f} MiB"
