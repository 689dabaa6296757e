"""The page of the results in a directory, beside them: one JSON file for each part, and its plot."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from paper.measure import Result
from paper.part import Part
from paper.text import NOT_MEASURED

COLUMNS = 120
HEAD = """
# Benchmarks: the experiments of the reference paper

SSDTrain (arXiv 2408.10013) promises a lower peak of activations at no cost, and larger micro-batches, for BERT, T5 and
GPT. This page has its experiments on two small machines, in several runs: their commands stand with the figures.
`make paper` measures all of it, and writes such a page to `demo-out/paper/`; `make paper QUICK=1` only shows that
everything runs. A part that has no figures here is marked as not measured.

- Modes of one case train in processes of their own that make steps in turns (`benchmarks/workers.py`).
- Ratios are of times, so below 1 is faster, unless their column says otherwise.
- "Commit" with a `+`: of that commit with changes that were committed later. "Beside": what else used the machine.
- A ratio is the median of the ratios within each round. In brackets stands the interval that holds it with 95%, by the
  sign test. It takes fifteen rounds to claim anything.
- A live peak is that of tensors above the level before the step, exact. A resident peak is that of the whole process.
"""


def page(parts: Sequence[Part], results: Path) -> str:
    """The text."""
    sections = [section for part in parts for section in _section(part, results)]
    return "\n".join(_wrapped("\n\n".join([HEAD.strip(), *sections]))) + "\n"


def _section(part: Part, results: Path) -> Iterator[str]:
    yield f"## {part.title}"
    yield f"The paper: {part.paper}"
    path = results / f"{part.name}.json"
    found: Result = json.loads(path.read_text()) if path.exists() else {"cases": {}}
    if not found["cases"]:
        yield f"**{NOT_MEASURED.capitalize()}** (`python benchmarks/paper --only {part.name} --dir DIR`)."
        return
    yield from _runs(found)
    yield part.section(found)
    if (results / f"{part.name}.svg").exists():
        yield f"![{part.title}]({part.name}.svg)"
    yield f"Not shown: {part.not_shown}"


def _runs(found: Result) -> Iterator[str]:
    """The command and the machine of every run that the cases are of, with their labels where there are several."""
    runs: dict[str, tuple[Result, list[str]]] = {}
    for label, case in found["cases"].items():
        runs.setdefault(json.dumps(case["run"]), (case["run"], []))[1].append(label)
    for run, labels in runs.values():
        if len(runs) > 1:
            yield f"{'; '.join(labels)}:"
        yield " \\\n".join(
            textwrap.wrap(run["command"], COLUMNS - 10, initial_indent="    ", subsequent_indent="        ")
        )
        yield "; ".join(f"{name}: {value}" for name, value in run["system"].items()) + "."
        if run["quick"]:
            yield "**These are shapes that only show that it runs.**"


def _wrapped(text: str) -> Iterator[str]:
    """Long lines are broken, but for those of tables and code."""
    for line in text.splitlines():
        if len(line) <= COLUMNS or line.startswith(("|", " ")):
            yield line
        else:
            yield from textwrap.wrap(line, COLUMNS, break_long_words=False, break_on_hyphens=False)
