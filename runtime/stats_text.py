"""Statistics as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ssd_fx.runtime.wear import wear

if TYPE_CHECKING:
    from ssd_fx.runtime.stats import Stats

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


def table(stats: Stats) -> str:
    """The bytes per step, or the likely reason if nothing ran. Rows that are 0 are left out, but for `_ALWAYS`."""
    foot = f"on disk at the moment: {_mib(stats.disk_bytes).strip()}"
    if not stats.graphs:
        return f"{nothing_ran(stats)}\n{foot}"
    steps = max(stats.steps, 1)
    head = f"{stats.steps} steps, {len(stats.graphs)} graphs, {1e3 * stats.stall_s / steps:.1f} ms of stall per step"
    rows = []
    for name, meaning in _MEANING.items():
        nbytes = getattr(stats, f"{name}_bytes") / steps
        if name == "drive" and stats.drive_bytes == stats.written_bytes:
            continue  # it says nothing new
        if nbytes or name in _ALWAYS:
            rows.append(f"{name:14}{_mib(nbytes)}   {meaning}")
    whole = [f"not counted: {_whole(stats)}"] if stats.whole_graphs else []
    return "\n".join([f"{head}; bytes per step:", *rows, foot, *_life(stats), *whole])


def nothing_ran(stats: Stats) -> str:
    """The likely reason why no graph ran."""
    if not stats.whole_graphs:
        return _idle(stats)
    if stats.whole_graphs == stats.compiled_graphs:
        return f"nothing is counted: {_whole(stats)}"
    return f"{_idle(stats)}; or what runs is not counted: {_whole(stats)}"


def _life(stats: Stats) -> list[str]:
    """A line about the life of the drives, once the speed is known and drives are written to."""
    if not stats.drive_bytes_s:
        return []
    daily, life = wear(stats.drive_tbw, stats.drive_bytes_s)
    return [f"at this speed {daily} are written in a day; {life}"]


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
