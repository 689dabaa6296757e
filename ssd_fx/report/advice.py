"""What to change: one sentence, by the first rule that fits. So the order of the rules is their priority."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ssd_fx.report.figures import Figures, drive_life
from ssd_fx.report.model import BELOW, WITHIN, Facts
from ssd_fx.report.unfreed import Unfreed, loud, unfreed
from ssd_fx.runtime.wear import format_days
from ssd_fx.sizes import format_bytes, format_seconds

SMALL = 0.02  # a share of the step, or of the memory, that is not worth a change
SHORT_DAYS = 180.0  # of a drive's life
FASTER = 1.5  # times as fast as the drives: host memory that is worth an advice
MIB, GIB = 1 << 20, 1 << 30


def advice(known: Facts, found: Figures) -> str:
    """The most useful change to options or model."""
    missed = loud(known)
    if missed:
        worst, nbytes = _worst(unfreed(known))
        share = f"{format_bytes(nbytes)} of the {format_bytes(missed)}"
        return f"{_free(worst)}: that is {share} that do not leave memory in a step, listed below"
    over = _within_memory(known, found) or _above_all(known, found)
    if over:
        return over
    if not found.offloaded_bytes:
        return _nothing_goes(known, found)
    stall, step = _stall(found)
    if stall > SMALL * step:
        host = _host_memory(known, found)
        return f"the step waits for the drives: {host}" if host else _keep_more(known, found, stall)
    small = known.kept[BELOW]
    if small > SMALL * max(found.stock_stay_bytes, found.stock_peak_bytes) and small > found.stay_bytes / 2:
        least = min((g.min_bytes for g in known.graphs), default=0)
        return f"min_bytes={max(1, least // 16)} would offload up to {format_bytes(small)} more, in smaller tensors"
    life = drive_life(found)
    if 0 < life < SHORT_DAYS:
        return f"the drives last {format_days(life)} at this rate: a larger budget writes less, {_next_share(known)}"
    kept, budget = known.kept[WITHIN], _budget(known)
    if kept > SMALL * found.stock_stay_bytes and budget != "auto":
        if budget:
            smaller = f"{_smaller(known)} keeps up to {format_bytes(kept)} less"
            return f"nothing waits, so a smaller budget costs little: {smaller}"
        return _spared(kept)
    if found.peak_bytes > (1 - SMALL) * found.stock_peak_bytes:
        return "the peak hardly falls, for it is not made of saved tensors: offloading cannot help this step"
    if kept > SMALL * found.stock_stay_bytes:
        return f"nothing: {format_bytes(kept)} stay within the budget, and the step hardly waits"
    return "nothing: what can be offloaded is, and the step hardly waits"


def without_plan(known: Facts, found: Figures) -> str:
    """The advice where no plan is known, from what was measured alone."""
    within = _within_memory(known, found)
    if within:
        return within
    stall, step = _stall(found)
    if stall > SMALL * step:
        return f"the step waits {format_seconds(stall)} for the drives: a budget in bytes keeps so much more in memory"
    return "nothing: the step hardly waits"


def _within_memory(known: Facts, found: Figures) -> str:
    """The advice under the option `memory`, which leaves nothing to choose but itself; empty without it."""
    stats = known.stats
    if stats is None or not stats.memory_limit_bytes:
        said = "nothing: from the second step on the runtime keeps what fits `memory`; `ssd-fx fit` predicts it"
        return said if any(graph.memory for graph in known.graphs) else ""
    if known.over_bytes:
        return (
            f"the last step took {format_bytes(known.over_bytes)} more than the limit: a smaller micro-batch, a loss "
            "in chunks, sharding or an optimizer with less state would help"
        )
    stall, step = _stall(found)
    if stall > SMALL * step:
        return f"the step waits {format_seconds(stall)} for the drives: more memory or a faster drive would end that"
    return "nothing: as much stays as fits, and the step hardly waits"


def _worst(found: Sequence[Unfreed]) -> tuple[Unfreed, int]:
    """Groups `found` by holder and line of the model. Returns the first of the group with the most bytes, and these."""
    alike: dict[tuple[str, str], list[Unfreed]] = {}
    for each in found:
        alike.setdefault((each.who, each.row.source or each.row.place), []).append(each)
    most = max(alike.values(), key=lambda group: sum(each.nbytes for each in group))
    return most[0], sum(each.nbytes for each in most)


def _free(worst: Unfreed) -> str:
    row = worst.row
    if row.shared == "output":
        return f"do not return {row.place} from the compiled code, nor keep it in a list"
    if worst.planned and row.reason == BELOW:
        return f"min_bytes={max(1, row.nbytes // 4)}"
    if worst.planned:
        return f"change what keeps {row.place}: {row.reason}"
    if row.measured is not None and row.measured.kept:
        return "give the drive room, or name another one in `dirs`"
    return f"let go of {row.place} before the backward, or mark it with ssd_fx.keep"


def _above_all(known: Facts, found: Figures) -> str:
    """The advice if a budget in bytes lets everything stay, as the size of the whole memory does; empty if not."""
    budget, movable = _budget(known), found.offloaded_bytes + known.kept[WITHIN]
    if not isinstance(budget, int) or budget < movable or not movable:
        return ""
    return (
        f"the budget of {format_bytes(budget)} is above the {format_bytes(movable)} that can leave memory, so all of "
        "it stays: a budget is what may stay of the saved tensors, not the memory's size; budget='auto' finds one"
    )


def _spared(nbytes: int) -> str:
    rest = format_bytes(nbytes)
    return f"nothing: the {rest} that stay lower no peak, so the drive is spared; spare=False offloads them too"


def _nothing_goes(known: Facts, found: Figures) -> str:
    small, kept = known.kept[BELOW], known.kept[WITHIN]
    if 2 * small > found.stock_stay_bytes:
        largest = max(row.nbytes for graph in known.graphs for row in graph.rows if row.reason == BELOW)
        return f"nothing is offloaded, for most is below min_bytes: min_bytes={max(1, largest // 4)} would change that"
    host = _host_memory(known, found)
    if host and _budget(known) == "auto" and kept:
        return f"nothing is offloaded, for the step is too short for the drives: {host}"
    if kept and found.floor_bytes > (1 - SMALL) * found.peak_bytes:
        return _spared(kept)
    if any(graph.budget not in (0, 0.0) for graph in known.graphs):
        return "nothing is offloaded under this budget: budget=0 offloads all that can be"
    return "nothing can be offloaded; the reasons are below"


def _host_memory(known: Facts, found: Figures) -> str:
    """What host memory would do; empty where it is no tier, is used, or is hardly faster than the drives."""
    times = max((graph.host_speedup for graph in known.graphs), default=0.0)
    if times < FASTER:
        return ""
    room = math.ceil((found.offloaded_bytes + known.kept[WITHIN]) / GIB)
    return f"host_budget='{room}GiB' sends tensors to host memory, which is {times:.0f} times as fast as the drives"


def _stall(found: Figures) -> tuple[float, float]:
    if found.measured_stall_s is not None and found.measured_step_s:
        return found.measured_stall_s, found.measured_step_s
    return found.stall_s, found.step_s


def _keep_more(known: Facts, found: Figures, stall: float) -> str:
    """The advice to keep as many bytes as the drive writes and reads in the time that the step waits."""
    rate = known.over_time.transfer_rate()
    movable = found.offloaded_bytes + known.kept[WITHIN]
    if not rate or not movable:
        return "a larger budget keeps more in memory and waits less"
    more = min(stall * rate / 2, found.offloaded_bytes)  # what stays is neither written nor read
    now = 1 - found.offloaded_bytes / movable
    share = min(1.0, math.ceil(20 * (now + more / movable)) / 20)
    said = f"{_share(share)} keeps about {format_bytes(int(share * movable))} in memory and should end"
    own = "" if _budget(known) == "auto" else "; budget='auto' searches by itself"
    return f"{said} the waits of {format_seconds(stall)}{own}"


def _budget(known: Facts) -> object:
    return next((graph.budget for graph in known.graphs), 0)


def _share(budget: float) -> str:
    """A share as the option takes it, always as a float: `1` would be a byte."""
    return f"budget={round(budget, 3)}"


def _smaller(known: Facts) -> str:
    budget = _budget(known)
    return _share(budget / 2) if isinstance(budget, float) and budget > 0.1 else "budget=0"


def _next_share(known: Facts) -> str:
    budget = _budget(known)
    if isinstance(budget, float):
        return _share(min(1.0, budget + 0.25))
    return f"budget='{max(1, 2 * budget // MIB)}MiB'" if isinstance(budget, int) and budget else "such as budget=0.25"
