"""What Inductor makes of our nodes: how a release gives its buffer up."""

from __future__ import annotations

import torch

from ssd_fx.passes.lowering.inductor import with_constant


def test_a_constant_is_found_by_its_name_whatever_follows_it() -> None:
    schema = torch._C.parse_schema(
        "f(Tensor(a!) handle, Tensor keepalive, int seq, bool hand_over=False, bool other=True) -> ()"
    )
    assert with_constant(schema, (7, True, True), "hand_over", False) == (7, False, True)
