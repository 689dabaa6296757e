"""A function that decides about each saved tensor: the option `policy`.

def by_size(saved: ssd_fx.SavedTensor) -> str | None:
    return "offload" if saved.nbytes >= 64 << 20 else None

model = torch.compile(model, backend=ssd_fx.backend, options={"policy": by_size})
"""

from __future__ import annotations

import inspect
import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch

Answer = Literal["keep", "offload", "recompute"]
ANSWERS = ("keep", "offload", "recompute")


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """Memory that the forward saves for the backward, described by the tensor that was computed into it.

    name: that of its node in the joint graph, such as `gelu_1`.
    module: the innermost module that it was computed in, by its name in `named_modules()`; empty for the model itself.
    op: the operator that computed it, such as `aten.gelu.default`; `input` for an input of the graph.
    shape: of the tensor. Dynamic sizes are those of the call that was compiled.
    dtype: of the tensor.
    nbytes: what saving it takes.
    """

    name: str
    module: str
    op: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int


@dataclass(frozen=True)
class Policy:
    """The user's function, and what compile caches know it by.

    name: for people. uuid: what its method `uuid()` has returned, as text; empty without one, and then only this
    process knows it, by its `number`. The function itself is in no key: it is neither compared nor pickled.
    """

    function: Callable[[SavedTensor], object] = field(compare=False, repr=False)
    name: str
    uuid: str = ""
    number: int = 0

    @staticmethod
    def of(function: Callable[[SavedTensor], object]) -> Policy:
        """The policy of a function, with the identity that its `uuid()` gives, as for a custom pass of Inductor."""
        name = str(getattr(function, "__qualname__", type(function).__qualname__)).replace("<locals>.", "")
        given = getattr(function, "uuid", None)
        uuid = given() if callable(given) else given
        if uuid is not None:
            return Policy(function, name, uuid=repr(uuid))
        return Policy(function, name, number=_number_of(function))

    def __call__(self, saved: SavedTensor) -> Answer | None:
        """What the function returns.

        Raises:
            ValueError: it is none of the answers.
        """
        answer = self.function(saved)
        if answer is not None and answer not in ANSWERS:
            where = f" of module {saved.module!r}" if saved.module else ""
            raise ValueError(
                f"policy {self.name} returns {answer!r} for tensor {saved.name!r}{where}; right would be "
                f"{', '.join(map(repr, ANSWERS))} or None"
            )
        return cast("Answer | None", answer)

    def __deepcopy__(self, memo: dict[int, Any]) -> Policy:
        return self

    def __reduce__(self) -> Any:
        return Policy, (_left_behind, self.name, self.uuid, self.number)


_count = itertools.count(1)
_numbers: dict[tuple[int, object], int] = {}
"""By the address of a function. A bound method is new at every lookup, so by its object's address and its function."""
_held: list[object] = []
"""Objects that cannot be referred to weakly. They are kept, so that no other one gets their address."""


def _number_of(function: object) -> int:
    """The number of a function without a `uuid()`, for as long as it lives. No other function ever gets the same."""
    owner, of = (function.__self__, function.__func__) if inspect.ismethod(function) else (function, None)
    key = id(owner), of
    if key not in _numbers:  # two threads may come here; no lock, which the child of a fork might find taken
        try:
            weakref.finalize(owner, _numbers.pop, key, None).atexit = False
        except TypeError:
            _held.append(owner)
    return _numbers.setdefault(key, next(_count))


def _left_behind(saved: SavedTensor) -> object:
    raise RuntimeError(f"a policy is not pickled with its graph, so nobody can ask it about {saved.name!r}")
