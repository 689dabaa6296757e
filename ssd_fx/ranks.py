"""What the processes (ranks) of one node share: drives, disk limits and host memory.

    2 directories, 4 ranks      ranks 0 and 2 write to the first, 1 and 3 to the second
    4 directories, 2 ranks      two each: 0 and 2, 1 and 3
    4 directories, 6 ranks      two groups of two: ranks 0, 2 and 4 to one, 1, 3 and 5 to the other
    3 directories, 2 ranks      both ranks stripe over all three

Every rank has the same share. Directories are divided into as many groups as the greatest common divisor of both
numbers, so that few ranks meet on a drive. The ranks of a group stripe over all its directories.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Ranks:
    """This process is number `rank` of `count` on its node. `number` counts over all nodes; None if it is alone."""

    rank: int = 0
    count: int = 1
    number: int | None = None

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.count} on this node"


def dealt(dirs: Sequence[str], ranks: Ranks) -> tuple[str, ...]:
    """The directories that a rank stripes over."""
    groups = _groups(dirs, ranks)
    return tuple(dirs[ranks.rank % groups :: groups])


def in_a_directory(dirs: Sequence[str], ranks: Ranks) -> int:
    """How many ranks have a file in each directory."""
    return ranks.count // _groups(dirs, ranks)


def _groups(dirs: Sequence[str], ranks: Ranks) -> int:
    return math.gcd(len(dirs), ranks.count)


def on_a_drive(dirs: Sequence[str], ranks: Ranks, drive_of: Callable[[str], object]) -> int:
    """How many ranks, this one included, write to drives that this one writes to.

    `drive_of` gives the drive of a directory.
    """
    mine = {drive_of(path) for path in dealt(dirs, ranks)}
    others = (dealt(dirs, Ranks(rank, ranks.count)) for rank in range(ranks.count))
    return sum(not mine.isdisjoint(map(drive_of, theirs)) for theirs in others)


def parse_ranks(name: str, value: object, environ: Mapping[str, str]) -> Ranks:
    """The ranks of this node, by `"auto"` or a number of processes, and by torchrun's variables in `environ`.

    Raises:
        ValueError: `value` is no number, or LOCAL_RANK is no rank among so many.
    """
    count = environ.get("LOCAL_WORLD_SIZE", "1") if value == "auto" else str(value)
    if not count.isdecimal() or not int(count):
        raise ValueError(f"option {name}={value!r}: {count!r} is no number of processes; right would be 'auto' or 8")
    rank = environ.get("LOCAL_RANK", "unset") if int(count) > 1 else "0"
    if not rank.isdecimal() or int(rank) >= int(count):
        raise ValueError(
            f"option {name}={value!r}: LOCAL_RANK is {rank} in the environment, and right among {count} processes "
            f"would be 0 to {int(count) - 1}, as torchrun sets it; ranks=1 shares nothing"
        )
    number = environ.get("RANK", rank)
    alone = environ.get("WORLD_SIZE", count) == "1" or not number.isdecimal()
    return Ranks(int(rank), int(count), None if alone else int(number))
