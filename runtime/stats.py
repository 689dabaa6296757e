"""Counters of what the runtime did since the last reset: for the process, and for each graph."""

import dataclasses
from dataclasses import dataclass, field

from ssd_fx.runtime.engines import registry
from ssd_fx.runtime.memory.buffers import POOL


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphStats:
    """Bytes, seconds and counts, summed over the steps of one graph.

    `saved_bytes`, `offloaded_bytes`: what the plan said at begin_. `written_bytes`, `read_bytes`: transfers that
    succeeded. `forwarded_bytes`: loads served from memory. `freed_bytes`: stored tensors whose memory really went,
    looked at when they are loaded or their handle dies. `kept_bytes`: stores that failed and stay in memory.
    `cancelled_bytes`: writes cut short because they were no longer needed. `wasted_bytes`: written, though somebody
    else held the tensor until it was wanted again. `held_bytes`: not written, because that is known of their slot, or
    because they are leaves. `prefetched_bytes`: reads that began before the graph asked. `encoded_from_bytes`,
    `encoded_to_bytes`: what compression got and made. `encoding_error`: the largest relative error (root mean square)
    that a lossy one was measured to make, at the first tensor of each slot. `stall_s`: time that ops waited for I/O.
    `in_planned_order`: the share of nodes that came with a greater seq than the one before them in their run.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats(GraphStats):
    """The sums over all graphs (`steps`: of the graph with most), and the state of the process.

    `staging_bytes`, `staging_peak_bytes`: memory that the pool of buffers has mapped, now and at most since the start.
    `disk_bytes`: space of the files. `compiled_graphs`: how often the backend was called, which no reset changes.
    `graphs`: each graph that ran, by its name.
    """

    staging_bytes: int = 0
    staging_peak_bytes: int = 0
    disk_bytes: int = 0
    compiled_graphs: int = 0
    graphs: dict[str, GraphStats] = field(default_factory=dict)

    def __str__(self) -> str:
        """A table per step of what was planned and moved, and of whatever else is not 0; or what to look at if nothing
        ran. `repr` has every field, and those of every graph."""
        steps = max(self.steps, 1)
        moved = {name: getattr(self, f"{name}_bytes") / steps for name in _MEANING}
        rows = [
            f"{name:14}{_mib(nbytes)}   {_MEANING[name]}" for name, nbytes in moved.items() if nbytes or name in _ALWAYS
        ]
        space = {name: getattr(self, f"{name}_bytes") for name in ("staging", "staging_peak", "disk")}
        held = ", ".join(f"{name.replace('_', ' ')} {_mib(nbytes).strip()}" for name, nbytes in space.items())
        if not self.graphs:
            return f"{self._nothing_ran()}\nat the moment: {held}"
        head = f"{self.steps} steps, {len(self.graphs)} graphs, {1e3 * self.stall_s / steps:.1f} ms of stall per step"
        return "\n".join([f"{head}; bytes per step:", *rows, f"at the moment: {held}"])

    def _nothing_ran(self) -> str:
        if self.compiled_graphs:
            return (
                f"nothing ran since the start or the last reset_stats(): of the {self.compiled_graphs} graphs that "
                "ssd_fx was asked to compile none has begun a forward that saves for a backward, as none does under "
                "torch.no_grad(); TORCH_LOGS=recompiles,graph_breaks tells what runs instead"
            )
        return (
            "nothing ran: torch.compile has not called ssd_fx in this process, so whatever trains does so uncompiled; "
            "TORCH_LOGS=+dynamo names what Dynamo is 'skipping' (of model.compile() the modules of torch itself, "
            "such as nn.Sequential, which torch.compile(model) takes)"
        )


_MEANING = {
    "saved": "by the forward for the backward",
    "offloaded": "of these planned to leave",
    "written": "to the drive or host memory",
    "read": "back from there",
    "forwarded": "not read: still in memory when wanted",
    "freed": "stored, and gone from memory meanwhile",
    "kept": "in memory, because storing them failed",
    "cancelled": "writes cut short, because the backward came",
    "wasted": "written in vain: somebody else held the tensor",
    "held": "not written: known to be held by somebody else",
    "prefetched": "of what was read, before the graph asked",
    "encoded_from": "what compression got",
    "encoded_to": "what it made of that",
}
_ALWAYS = ("saved", "offloaded", "written", "read", "forwarded", "freed")


def _mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:10.2f} MiB"


@dataclass(slots=True)
class Counters:
    """The mutable half of `GraphStats`, and what tells whether the planned order is the order that runs."""

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
    nodes: int = 0
    ordered: int = 0
    forward_seq: int = -1
    backward_seq: int = -1
    backward_first: int = 1 << 62

    def forward(self, seq: int) -> None:
        """A node of the forward ran; `begin` starts its runs."""
        self.nodes += 1
        self.ordered += seq > self.forward_seq
        self.forward_seq = seq

    def backward(self, seq: int) -> None:
        """A node of the backward ran; the lowest seq starts its runs."""
        if seq <= self.backward_first:
            self.backward_first, self.backward_seq = seq, -1
        self.nodes += 1
        self.ordered += seq > self.backward_seq
        self.backward_seq = seq

    def begin(self, saved_bytes: int, offloaded_bytes: int) -> None:
        """A run of the forward starts."""
        self.steps += 1
        self.saved_bytes += saved_bytes
        self.offloaded_bytes += offloaded_bytes
        self.forward_seq = -1


_SUMMED = [
    f.name for f in dataclasses.fields(GraphStats) if f.name not in ("steps", "encoding_error", "in_planned_order")
]
_graphs: dict[str, Counters] = {}
_compiled = 0


def counters(graph: str) -> Counters:
    """The counters of `graph`, made at its first node."""
    found = _graphs.get(graph)
    return found if found is not None else _graphs.setdefault(graph, Counters())


def compiled() -> None:
    """The backend compiled a graph."""
    global _compiled
    _compiled += 1


def stats() -> Stats:
    """A snapshot. Takes no lock, so a signal handler may call it."""
    graphs = dict(_graphs)
    sums = {name: sum(getattr(c, name) for c in graphs.values()) for name in _SUMMED}
    nodes = sum(c.nodes for c in graphs.values())
    ordered = sum(c.ordered for c in graphs.values())
    return Stats(
        **sums,
        steps=max((c.steps for c in graphs.values()), default=0),
        encoding_error=max((c.encoding_error for c in graphs.values()), default=0.0),
        in_planned_order=ordered / nodes if nodes else 1.0,
        staging_bytes=POOL.resident_bytes,
        staging_peak_bytes=POOL.peak_bytes,
        disk_bytes=registry.disk_bytes(),
        compiled_graphs=_compiled,
        graphs={name: _snapshot(c) for name, c in graphs.items()},
    )


def reset_stats() -> None:
    """Sets all counters to zero, and the peaks to what is there now."""
    _graphs.clear()
    POOL.peak_bytes = POOL.resident_bytes


def _snapshot(c: Counters) -> GraphStats:
    values = {name: getattr(c, name) for name in _SUMMED}
    return GraphStats(
        **values,
        steps=c.steps,
        encoding_error=c.encoding_error,
        in_planned_order=c.ordered / c.nodes if c.nodes else 1.0,
    )
