"""What is counted in the code that Inductor generated for one graph."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_DEFINED = re.compile(r"^(\w+) = async_compile\.triton\('\w+', '''(.*?)'''", re.DOTALL | re.MULTILINE)
DEFINITIONS_END = "async_compile.wait(globals())"
_GUARD = re.compile(r"with torch\.cuda\._DeviceGuard\(")
LAUNCHED = re.compile(r"(\w+)\.run\(")
_LIBRARY = re.compile(r"extern_kernels\.\w+\(|torch\.ops\.[\w.]+\(")
_SUMMED = re.compile(r"\.sum\(dim=0\)")
_STORED = re.compile(r"ssd_fx_ops\.store\(")
_LOADED = re.compile(r"ssd_fx_ops\.load\(")
_RELEASED = re.compile(r"ssd_fx_ops\.wait_store_\(.*, (True|False), (True|False)(?:, -?\d+)?\)")
_MADE, _DROPPED = re.compile(r"(\w+) = (empty_strided_cuda\(.*|\w+)"), re.compile(r"\bdel (\w+)")
_SIGNATURE = re.compile(r"'signature': \{(.*?)\}")
_ALIGNED = re.compile(r"divisible_by_16=\(([\d, ]*)\)|'configs': \[\{(.*?)\}\]")  # without Triton, and with it


@dataclass(frozen=True)
class Counts:
    """Of one graph.

    `guards`: how often the code enters a device; `kernels`: launches of Triton's; `library`: calls of others that are
    not ours; `sums`: calls of PyTorch's `sum`, for what a kernel has summed up in parts; `tensors`: arguments of all
    launches that are tensors, and `aligned`: those of them that Triton is told begin at a multiple of 16 bytes;
    `handed_over`: releases that return at once, `asked`: those that the plan has wait
    for the write.
    """

    guards: int
    kernels: int
    library: int
    sums: int
    tensors: int
    aligned: int
    stores: int
    loads: int
    releases: int
    handed_over: int
    asked: int

    @property
    def launches(self) -> int:
        return self.kernels + self.library + self.sums

    @property
    def blocking(self) -> int:
        """Releases that wait for the write though the plan does not ask for it."""
        return self.releases - self.handed_over


def count(code: str) -> Counts:
    """Of generated code.

    Raises: ValueError for code without calls, or a kernel that does not say what it takes.
    """
    definitions, end, calls = code.partition(DEFINITIONS_END)
    if not end:
        raise ValueError(f"no {DEFINITIONS_END!r} in the code:\n{code}")
    kernels = {name: _arguments(name, source) for name, source in _DEFINED.findall(definitions)}
    launched = [kernels[name] for name in LAUNCHED.findall(calls)]
    released = _RELEASED.findall(calls)
    return Counts(
        guards=len(_GUARD.findall(calls)),
        kernels=len(launched),
        library=len(_LIBRARY.findall(calls)),
        sums=len(_SUMMED.findall(calls)),
        tensors=sum(len(arguments) for arguments in launched),
        aligned=sum(sum(arguments) for arguments in launched),
        stores=len(_STORED.findall(calls)),
        loads=len(_LOADED.findall(calls)),
        releases=len(released),
        handed_over=sum(hand_over == "True" for hand_over, _ in released),
        asked=sum(block == "True" for _, block in released),
    )


def most_alive(code: str, size: tuple[int, ...]) -> int:
    """How many buffers of a size the code holds at once."""
    alive: set[str] = set()
    most = 0
    for line in code.partition(DEFINITIONS_END)[2].splitlines():
        for name, value in _MADE.findall(line):
            if value.startswith(f"empty_strided_cuda({size}, ") or value in alive:  # one under another name
                alive.add(name)
        alive.difference_update(_DROPPED.findall(line))
        most = max(most, len(alive))
    return most


def _arguments(name: str, source: str) -> list[bool]:
    """For each tensor that a kernel takes, whether it is known to be aligned."""
    signature, aligned = _SIGNATURE.search(source), _ALIGNED.search(source)
    if signature is None or aligned is None:
        raise ValueError(f"kernel {name} says no signature or no alignment:\n{source}")
    known = set(map(int, re.findall(r"\d+", aligned[1] or "") or re.findall(r"\((\d+),\)", aligned[2] or "")))
    return list(_tensors(signature[1], known))


def _tensors(signature: str, known: set[int]) -> Iterator[bool]:
    for i, kind in enumerate(re.findall(r"'\w+': '([^']*)'", signature)):
        if kind.startswith("*"):
            yield i in known
