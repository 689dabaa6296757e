"""Prints the table: for every graph what plain Inductor's code has, and what ours has."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.cuda_codegen.code import Counts
from tests.cuda_codegen.models import CASES
from tests.cuda_codegen.process import Generated, generated

HEAD = (
    "| model | graph | device guards | kernels | library calls | tensor arguments known to be aligned | stores, loads |"
    " releases that block unasked |"
)


def table(found: Iterable[Generated]) -> str:
    """Markdown. Values are "Inductor / ssd_fx"."""
    by_case: dict[str, dict[str, Generated]] = {}
    for each in found:
        by_case.setdefault(each.case, {})[each.backend] = each
    rows = [row for case, of in by_case.items() for row in _rows(case, of["inductor"], of["ssd_fx"])]
    return "\n".join([HEAD, "|" + "---|" * (HEAD.count("|") - 1), *rows])


def _rows(case: str, plain: Generated, ours: Generated) -> Iterator[str]:
    halves = (("forward", plain.forward, ours.forward), ("backward", plain.backward, ours.backward))
    for graph, theirs, mine in halves:
        pairs = [f"{getattr(theirs, name)} / {getattr(mine, name)}" for name in ("guards", "kernels", "library")]
        moved = f"{mine.stores} stores" if graph == "forward" else f"{mine.loads} loads"
        blocking = f"{mine.blocking} of {mine.releases}" if mine.releases else ""
        cells = [case, graph, *pairs, f"{_aligned(theirs)} / {_aligned(mine)}", moved, blocking]
        yield f"| {' | '.join(cells)} |"


def _aligned(counts: Counts) -> str:
    return f"{counts.aligned} of {counts.tensors}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(map(repr, CASES))}; default all")
    parser.add_argument("--code", type=Path, metavar="DIR", help="also write the generated code there")
    flags = parser.parse_args()
    if unknown := sorted(set(flags.cases) - set(CASES)):
        parser.error(f"no cases {unknown}; there are {list(CASES)}")
    if flags.code:
        flags.code.mkdir(parents=True, exist_ok=True)
    print(table(generated(flags.cases or CASES, flags.code)))


if __name__ == "__main__":
    main()
