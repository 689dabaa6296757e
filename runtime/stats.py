"""Counts of what the runtime did since the last reset: for each graph, and summed for the process."""

import dataclasses
import time
from collections import deque
from dataclasses import dataclass, field

from ssd_fx.runtime.engines import registry


@dataclass(slots=True, kw_only=True)
class GraphStats:
    """Bytes, seconds and counts, summed over the steps of one graph.

    `saved_bytes`, `offloaded_bytes`: of the plan, counted at the start of each forward.
    `written_bytes`, `read_bytes`: transfers that succeeded.
    `forwarded_bytes`: loads served from memory.
    `freed_bytes`: stored tensors whose memory was really freed, seen when they are loaded or their handle dies.
    `kept_bytes`: tensors that stay in memory because storing them failed.
    `cancelled_bytes`: writes ended early because they were no longer needed.
    `wasted_bytes`: written although somebody else held the tensor until it was loaded or its handle died.
    `held_bytes`: not written, because somebody else is known to hold the slot's tensors or the tensor is a leaf.
    `prefetched_bytes`: reads that began before the graph asked.
    `encoded_from_bytes`, `encoded_to_bytes`: before and after compression.
    `encoding_error`: the largest relative error (root mean square) of a lossy codec, measured at the first tensor of
    each slot.
    `stall_s`: seconds that ops waited for I/O.
    `in_planned_order`: the share of nodes that came with a greater seq than the node before them in their run.
    """

    steps: int = 0
    stores: int = 0
    loads: int = 0
    saved_bytes: int = 0
    offloaded_bytes: int = 0
    written_bytes: int = 0
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
    in_planned_order: float = 1.0


@dataclass(slots=True, kw_only=True)
class Stats(GraphStats):
    """The sums over all graphs, and the state of the process. `steps` is that of the graph with the most.

    `disk_bytes`: the size of the files.
    `written_bytes_s`: the present speed, over up to `PACE_STEPS` steps; 0 before the third step.
    `drive_tbw`: rated endurance of the drives in 10^12 bytes, this rank's share of the option; 0 if it is not known.
    `compiled_graphs`: how often the backend was called; a reset does not change it.
    `graphs`: each graph that ran, by its name.
    """

    disk_bytes: int = 0
    written_bytes_s: float = 0.0
    drive_tbw: float = 0.0
    compiled_graphs: int = 0
    graphs: dict[str, GraphStats] = field(default_factory=dict)

    @property
    def written_tb_per_day(self) -> float:
        """10^12 bytes a day at the present speed, day and night."""
        return self.written_bytes_s * 86400 / 1e12

    @property
    def drive_life_days(self) -> float:
        """Days until the rated endurance of new drives is written at the present speed; 0 if that is not known."""
        return self.drive_tbw / self.written_tb_per_day if self.written_bytes_s else 0.0

    def __str__(self) -> str:
        """A table of the bytes per step, or the likely reason if nothing ran.

        Rows that are 0 are left out, but for those in `_ALWAYS`. `repr` has every field, and those of every graph.
        """
        foot = f"on disk at the moment: {_mib(self.disk_bytes).strip()}"
        if not self.graphs:
            return f"{self._nothing_ran()}\n{foot}"
        steps = max(self.steps, 1)
        head = f"{self.steps} steps, {len(self.graphs)} graphs, {1e3 * self.stall_s / steps:.1f} ms of stall per step"
        rows = []
        for name, meaning in _MEANING.items():
            nbytes = getattr(self, f"{name}_bytes") / steps
            if nbytes or name in _ALWAYS:
                rows.append(f"{name:14}{_mib(nbytes)}   {meaning}")
        return "\n".join([f"{head}; bytes per step:", *rows, foot, *self._wear()])

    def _wear(self) -> list[str]:
        """A line about the life of the drives, once the speed is known and something is on disk."""
        if not self.written_bytes_s or not self.disk_bytes:
            return []
        life = "the option drive_tbw says how long drives last"
        if self.drive_tbw:
            life = f"new drives rated for {self.drive_tbw:g} TB last {self.drive_life_days:.3g} days"
        return [f"at this speed {self.written_tb_per_day:.3g} TB are written in a day; {life}"]

    def _nothing_ran(self) -> str:
        if self.compiled_graphs:
            return (
                f"nothing ran since the start or the last reset_stats(): of the {self.compiled_graphs} graphs that "
                "ssd_fx was asked to compile none has begun a forward that saves for a backward, as none does under "
                "torch.no_grad(); TORCH_LOGS=recompiles,graph_breaks shows what runs instead"
            )
        return (
            "nothing ran: torch.compile has not called ssd_fx in this process, so whatever trains does so uncompiled; "
            "TORCH_LOGS=+dynamo names what Dynamo is 'skipping' (of model.compile() the modules of torch itself, "
            "such as nn.Sequential, which torch.compile(model) takes)"
        )


_MEANING = {
    "saved": "by the forward for the backward",
    "offloaded": "of these, planned for the drive or host memory",
    "written": "to the drive or host memory",
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
_ALWAYS = ("saved", "offloaded", "written", "read", "forwarded", "freed")


def _mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:10.2f} MiB"


@dataclass(slots=True, kw_only=True)
class Counters(GraphStats):
    """The counts of one graph while it runs, and the order of its nodes."""

    nodes: int = 0
    ordered: int = 0  # of these, in planned order
    forward_seq: int = -1  # of the last node
    backward_seq: int = -1
    backward_first: int = 1 << 62  # the lowest seq in the backward so far: its node starts a run

    def forward(self, seq: int) -> None:
        """Counts a node of the forward."""
        self._count(seq > self.forward_seq)
        self.forward_seq = seq

    def backward(self, seq: int) -> None:
        """Counts a node of the backward."""
        if seq <= self.backward_first:
            self.backward_first = seq
            self.backward_seq = -1
        self._count(seq > self.backward_seq)
        self.backward_seq = seq
        _pace.turn()

    def _count(self, in_order: bool) -> None:
        self.nodes += 1
        if in_order:
            self.ordered += 1
        self.in_planned_order = self.ordered / self.nodes

    def begin(self, saved_bytes: int, offloaded_bytes: int) -> None:
        """Counts a forward that starts."""
        _pace.begin(time.perf_counter())
        self.steps += 1
        self.saved_bytes += saved_bytes
        self.offloaded_bytes += offloaded_bytes
        self.forward_seq = -1


PACE_STEPS = 16


class _Pace:
    """Bytes written by the process, against the clock, at the starts of steps.

    A step starts with the first forward behind a backward: a step of many graphs, or of one graph many times, is one.
    The first start is left out, because its step compiles.
    """

    def __init__(self) -> None:
        self.starts: deque[tuple[float, int]] = deque(maxlen=PACE_STEPS + 1)
        self._turned = False

    def turn(self) -> None:
        """A node of a backward ran."""
        self._turned = True

    def begin(self, now_s: float) -> None:
        """A forward starts."""
        if self._turned:
            self._turned = False
            self.starts.append((now_s, sum(c.written_bytes for c in dict(_graphs).values())))

    def bytes_s(self) -> float:
        """Over the steps between the starts; 0 for fewer than two."""
        if len(self.starts) < 2:
            return 0.0
        (first_s, before), (last_s, after) = self.starts[0], self.starts[-1]
        return (after - before) / (last_s - first_s)


_SUMMED = [
    f.name for f in dataclasses.fields(GraphStats) if f.name not in ("steps", "encoding_error", "in_planned_order")
]
_graphs: dict[str, Counters] = {}
_pace = _Pace()
_compiled = 0
_drive_tbw = 0.0


def counters(graph: str) -> Counters:
    """The counters of `graph`, made at its first node."""
    found = _graphs.get(graph)
    return found if found is not None else _graphs.setdefault(graph, Counters())


def compiled() -> None:
    """Counts a graph that the backend compiled."""
    global _compiled
    _compiled += 1


def rated(drive_tbw: float) -> None:
    """Takes the rated endurance of the drives, in 10^12 bytes; 0 changes nothing."""
    global _drive_tbw
    _drive_tbw = drive_tbw or _drive_tbw


def stats() -> Stats:
    """A snapshot of all counts. Takes no lock, so a signal handler may call it."""
    graphs = dict(_graphs)
    sums = {name: sum(getattr(c, name) for c in graphs.values()) for name in _SUMMED}
    nodes = sum(c.nodes for c in graphs.values())
    ordered = sum(c.ordered for c in graphs.values())
    return Stats(
        **sums,
        steps=max((c.steps for c in graphs.values()), default=0),
        encoding_error=max((c.encoding_error for c in graphs.values()), default=0.0),
        in_planned_order=ordered / nodes if nodes else 1.0,
        disk_bytes=registry.disk_bytes(),
        written_bytes_s=_pace.bytes_s(),
        drive_tbw=_drive_tbw,
        compiled_graphs=_compiled,
        graphs={name: _snapshot(c) for name, c in graphs.items()},
    )


def reset_stats() -> None:
    """Sets all counts to zero."""
    global _pace
    _graphs.clear()
    _pace = _Pace()


def _snapshot(c: Counters) -> GraphStats:
    return GraphStats(**{f.name: getattr(c, f.name) for f in dataclasses.fields(GraphStats)})
