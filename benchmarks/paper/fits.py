"""The largest batch in the memory that keeping needs for a batch, and its tokens/s (the paper: twice the batch)."""

from __future__ import annotations

import sys
import threading
from dataclasses import replace
from statistics import median

import system
from training import Task
from workers import Ended, Workers

from paper import text
from paper.measure import Result, Setup, measure
from paper.part import Part

KEEP = "Inductor"
TIMES = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)  # batches that are tried
ANYTHING = 1 << 62  # bytes
SLACK = 1.02  # of the limit over what the probe was seen to have, and from one limit that is tried to the next
MOST = 1.5  # of the limit over what the probe was seen to have
LOOK_S = 0.001  # between two looks
STEPS = 3


def _tasks(setup: Setup, batch: int) -> dict[str, Task]:
    width, layers = setup.shapes[0]
    model = setup.model("gpt", width, layers, batch)
    if setup.quick:
        return {KEEP: setup.plain(model), "ssd_fx, budget 0": setup.ours(model)}
    return {
        KEEP: setup.plain(model),
        "checkpoint": setup.plain(model, "checkpoint"),
        "ssd_fx, budget 0": setup.ours(model),
        "ssd_fx, budget auto": setup.ours(model, "auto"),
    }


def _measure(setup: Setup) -> Result:
    """The limit is that of RLIMIT_DATA, which Linux holds against all private memory of a process."""
    label = f"keep at batch {setup.batch}"
    found: Result = {"planned": [label], "cases": {}}
    if setup.is_over or label in setup.done:
        return found
    seen = _needs(replace(_tasks(setup, setup.batch)[KEEP], limit_bytes=ANYTHING))
    limit = int(SLACK * seen)
    while (case := _case(setup, limit)) is None:
        limit = int(SLACK * limit)
        if limit > MOST * seen:
            raise Ended(KEEP, f"{KEEP} at batch {setup.batch} does not train in {MOST} times what it was seen to have")
    found["cases"][label] = case
    return found


def _case(setup: Setup, limit: int) -> Result | None:
    """The rounds of each mode's largest batch; None if `KEEP` does not fit, so that the limit is too small.

    The probe may have missed a peak between two looks. And heaps differ from run to run, so a mode may fail after some
    rounds. Then all rounds are made again, with the next smaller batch of that mode.
    """
    if not _fits(replace(_tasks(setup, setup.batch)[KEEP], limit_bytes=limit)):
        return None
    tried = {name: _tried(setup, name, limit) for name in _tasks(setup, setup.batch)}
    while KEEP in (batches := _largest(tried)):
        tasks = {name: _tasks(setup, batch)[name] for name, batch in batches.items()}
        try:
            case = measure(setup, {name: replace(task, limit_bytes=limit) for name, task in tasks.items()})
            failed = list(case["failed"])
        except Ended as ended:
            failed = [ended.worker]
        if not failed:
            return case | {"limit_bytes": limit, "batches": batches, "tried": tried}
        for name in failed:
            print(f"{name}: batch {batches[name]} does not fit after all", file=sys.stderr, flush=True)
            tried[name][batches[name]] = False
    return None


def _largest(tried: dict[str, dict[int, bool]]) -> dict[str, int]:
    """The largest batch that fits, of every mode that has one."""
    return {name: batch for name, tries in tried.items() for batch, fits in tries.items() if fits}


def _tried(setup: Setup, name: str, limit: int) -> dict[int, bool]:
    """Whether each batch fits, up to the first that does not."""
    found: dict[int, bool] = {}
    for factor in (1.0, 2.0) if setup.quick else TIMES:
        if found and setup.is_over:
            break
        batch = int(factor * setup.batch)
        found[batch] = _fits(replace(_tasks(setup, batch)[name], limit_bytes=limit))
        if not found[batch]:
            break
    return found


def _needs(task: Task) -> int:
    """The most private memory of a process that compiles and trains so."""
    seen, ended = [0], threading.Event()

    def look() -> None:
        goes_on = True
        while goes_on:
            goes_on = not ended.wait(LOOK_S)
            for worker in list(workers.workers.values()):
                seen[0] = max(seen[0], system.data_bytes(worker.process))

    with Workers({"probe": task}) as workers:
        thread = threading.Thread(target=look)
        thread.start()
        try:
            workers.compile()
            list(workers.rounds(STEPS))
        finally:
            ended.set()
            thread.join()
    assert seen[0], "the thread has looked"
    return seen[0]


def _fits(task: Task) -> bool:
    """Whether a process with so much memory compiles and makes `STEPS` steps."""
    with Workers({"limited": task}) as workers:
        try:
            workers.compile()
            list(workers.rounds(STEPS))
        except Ended:
            return False
    return True


def _section(result: Result) -> str:
    parts = []
    for label, case in result["cases"].items():
        head = ("mode", "largest batch", "tokens/s", "time per token to Inductor", "live peak, MiB", "fails at")
        limit = f"The memory of {label}: {text.mib(case['limit_bytes'])} MiB of private memory, all of the process"
        rows = [_row(name, case) for name in case["tried"]]
        parts.append(f"{limit}; {text.rounds(case)}.\n\n{text.table(head, rows)}")
    return "\n\n".join([*parts, *text.missing(result)])


def _row(name: str, case: Result) -> tuple[str, ...]:
    fails = ", ".join(str(batch) for batch, fits in case["tried"][name].items() if not fits)
    mode, keep = case["modes"].get(name), case["modes"].get(KEEP)
    if mode is None:
        return name, "none", "", "", "", fails
    ratio = str(text.Ratio.of(_per_token(mode), _per_token(keep))) if keep else ""
    batch, speed = str(case["batches"][name]), f"{mode['tokens'] / median(mode['time_s']):.0f}"
    return name, batch, speed, ratio, text.mib(mode["peak_bytes"]), fails or "not tried further"


def _per_token(mode: Result) -> Result:
    return {"time_s": [seconds / mode["tokens"] for seconds in mode["time_s"]]}


PART = Part(
    name="fits",
    title="The largest batch in equal memory",
    share=0.1,
    paper="The micro-batch is twice as large in equal memory.",
    not_shown="The limit holds the interpreter, PyTorch and compiling too, unlike a GPU's. Compiling with ssd_fx "
    "needs more than with Inductor alone, so a model of a few MiB of activations does not fit.",
    measure=_measure,
    section=_section,
)
