"""What Inductor makes of our nodes: how a release gives its buffer up, and where it rounds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._inductor import lowering

import ssd_fx
from ssd_fx.passes.lowering import inductor
from ssd_fx.passes.lowering.inductor import with_constant
from tests.passes import toys
from tests.passes.recomputing import SLOW, everything_recomputed


def test_a_constant_is_found_by_its_name_whatever_follows_it() -> None:
    schema = torch._C.parse_schema(
        "f(Tensor(a!) handle, Tensor keepalive, int seq, bool hand_over=False, bool other=True) -> ()"
    )
    assert with_constant(schema, (7, True, True), "hand_over", False) == (7, False, True)


@pytest.fixture
def rounding(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Patches our choice of what is rounded. Inductor, which compiling gave it to, has the true one back in the end."""
    true = inductor._is_saved_and_read
    yield monkeypatch
    monkeypatch.undo()
    inductor.register()
    assert lowering._has_saved_lowp_output_use is true


@pytest.mark.skipif(inductor._SAVED_AND_READ is None, reason="this torch rounds nothing that is saved")
def test_what_is_computed_again_is_rounded_in_both_graphs(rounding: pytest.MonkeyPatch) -> None:
    """The forward's maximum is that of rounded elements, so the backward must look for it among rounded ones."""
    asked: dict[str, list[bool]] = {}
    is_saved_and_read = inductor._is_saved_and_read

    def look(node: torch.fx.Node | None) -> bool:
        answer = is_saved_and_read(node)
        asked.setdefault(node.name if node else "", []).append(answer)
        return answer

    rounding.setattr(inductor, "_is_saved_and_read", look)
    torch._dynamo.reset()
    options = {"budget": 0, "min_bytes": 0, "engine": "memory", "recompute": True, "machine": SLOW}
    with everything_recomputed() as groups:
        torch.compile(toys.rounded, backend=ssd_fx.backend, options=options)(*toys.inputs()).backward()
    assert sum(groups) > 0
    assert asked["sub"] == [True, True]


@pytest.mark.skipif(inductor._SAVED_AND_READ is None, reason="this torch rounds nothing that is saved")
def test_what_is_stored_is_rounded_as_if_it_was_kept(rounding: pytest.MonkeyPatch) -> None:
    """A GPU's kernel goes on with what the backward will read, and not with the float32 that it computes in."""
    rounded: dict[float, set[str]] = {1.0: set(), 0: set()}
    is_saved_and_read = inductor._is_saved_and_read
    for budget, found in rounded.items():

        def look(node: torch.fx.Node | None, found: set[str] = found) -> bool:
            answer = is_saved_and_read(node)
            found |= {node.name} if answer and node is not None else set()
            return answer

        rounding.setattr(inductor, "_is_saved_and_read", look)
        torch._dynamo.reset()
        options = {"budget": budget, "min_bytes": 0, "engine": "memory", "recompute": False}
        with torch._inductor.config.patch(force_disable_caches=True):
            torch.compile(toys.rounded, backend=ssd_fx.backend, options=options)(*toys.inputs())
        assert (ssd_fx.stats().stores > 0) == (budget == 0)
    assert rounded == {1.0: {"sub"}, 0: {"sub"}}
