"""What the dump says: modules, what is recomputed, and equal layers folded."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

from ssd_fx.passes.groups import AliasGroup
from ssd_fx.passes.joint.modules import source_line
from ssd_fx.passes.partition import node_names
from ssd_fx.passes.plan import Plan, Price, Recompute
from ssd_fx.passes.schedule import Schedule
from ssd_fx.report import describe, dump
from ssd_fx.report.rows import Row, fold
from ssd_fx.sizes import format_bytes, format_seconds
from tests.passes import toys


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(x).sigmoid() @ x


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attn(x).tanh()


class Model(nn.Module):
    """Four blocks that are alike and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).exp().sin().sum()


def test_layers_that_are_alike_are_told_once() -> None:
    x, _ = toys.inputs()
    assert_expected_inline(
        toys.planned(Model(), x).table,
        """\
sigmoid  blocks.{0..3}.attn x 4  256 B  offload  store>sigmoid release>tanh_3 load<t_26 wait<mm_23  [sigmoid]
tanh     blocks.{0..3} x 4       256 B  offload  store>tanh release>mm_8 load<t_20 wait<mm_20       [tanh]
exp                              256 B  offload  store>exp release>sum_1 load<expand wait<cos       [exp]""",
    )


def test_layers_that_differ_are_told_apart() -> None:
    """A pattern keeps what one of them saves."""
    x, _ = toys.inputs()
    assert_expected_inline(
        toys.planned(Model(), x, keep=("blocks.2.attn",)).table,
        """\
sigmoid    blocks.{0..1}.attn x 2  256 B  offload  store>sigmoid release>tanh_3 load<t_26 wait<mm_23     [sigmoid]
tanh       blocks.{0..1} x 2       256 B  offload  store>tanh release>mm_8 load<t_20 wait<mm_20          [tanh]
sigmoid_2  blocks.2.attn           256 B  keep     keep=['blocks.2.attn']                                [sigmoid_2]
tanh_2     blocks.2                256 B  offload  store>tanh_2 release>sum_1 load<expand wait<mm_12     [tanh_2]
sigmoid_3  blocks.3.attn           256 B  offload  store>sigmoid_3 release>sum_1 load<expand wait<mm_11  [sigmoid_3]
tanh_3     blocks.3                256 B  offload  store>tanh_3 release>sum_1 load<expand wait<mm_9      [tanh_3]
exp                                256 B  offload  store>exp release>sum_1 load<expand wait<cos          [exp]""",
    )


def test_all_detail_is_in_the_json() -> None:
    x, _ = toys.inputs()
    partition = toys.partitioned(Model(), x)
    names = node_names(partition)
    planned = toys.planned(Model(), x)
    found = dump.dump(planned.partition, planned.plan, names).plan
    groups = found["groups"]
    assert [g["name"] for g in groups] == [g.base for g in planned.plan.groups]
    assert sum(g["nbytes"] for g in groups if g["decision"] == "offload") == found["offloaded_bytes"]
    assert groups[0].pop("source").startswith(f"{Path(__file__).name}:")
    assert_expected_inline(
        json.dumps(groups[0], indent=1),
        """\
{
 "slot": 0,
 "name": "sigmoid",
 "module": "blocks.0.attn",
 "nbytes": 256,
 "stored_nbytes": 256,
 "decision": "offload",
 "reason": "",
 "members": [
  "sigmoid"
 ],
 "store": "sigmoid",
 "release": "tanh_3",
 "load": "t_26",
 "wait": "mm_23"
}""",
    )
    assert set(found["predicted"]) >= {"peak_bytes", "floor_bytes", "limit_bytes"}


def test_what_is_computed_again_has_rows_of_its_own() -> None:
    planned = toys.planned(toys.relu_chain)
    groups = tuple(AliasGroup(i, f"gelu_{i}", None, (), nbytes=1024, stored_nbytes=1024) for i in range(3))
    proposal = Plan("graph", groups, baseline=planned.plan.baseline).with_(
        modules={i: f"blocks.{i}.mlp" for i in range(3)},
        decisions=dict.fromkeys(range(3), Recompute(frozenset())),
        prices=dict.fromkeys(range(3), Price(1.32e-5, frozenset())),
    )
    text = dump.table(planned.plan.with_(schedule=Schedule(), proposal=proposal), ([], []))
    head, *lines = text.splitlines()
    assert head.endswith(", 1 groups and 256 B offloaded (100.0%), 3 tensors and 3072 B recomputed")
    assert_expected_inline(
        "\n".join(lines[:-3]),
        """\
relu                            256 B  offload               [relu]
gelu_0  blocks.{0..2}.mlp x 3  1024 B  recompute  0.0132 ms""",
    )


def rows(*modules: str, size: str = "8 B") -> list[Row]:
    named = enumerate(modules)
    return [Row(f"mm_{i}", module, size, "keep", "within the budget", members=("t",)) for i, module in named]


def test_rows_name_the_line_of_the_model() -> None:
    """Not that of PyTorch's own modules, which the model calls."""
    planned = toys.planned(Model(), toys.inputs()[0])
    text = dump.table(planned.plan, node_names(planned.partition), describe.source_lines(planned.partition))
    lines, start = inspect.getsourcelines(Attention.forward)
    at = start + next(i for i, line in enumerate(lines) if "sigmoid" in line)
    assert f"blocks.{{0..3}}.attn x 4  {Path(__file__).name}:{at}  256 B" in text
    saved_linear = next(n for n in planned.partition.forward.graph.nodes if n.name == "mm_8")
    lines, start = inspect.getsourcelines(Model.forward)
    at = start + next(i for i, line in enumerate(lines) if "self.head" in line)
    assert source_line(saved_linear) == f"{Path(__file__).name}:{at}"


def test_torchvision_is_not_pytorch() -> None:
    node = torch.fx.Graph().placeholder("x")
    site = Path(torch.__file__).parents[1]
    frames = ("train.py", site / "torchvision/models/resnet.py", site / "torch/nn/modules/conv.py")
    node.meta["stack_trace"] = "\n".join(f'File "{file}", line {10 + i}, in f' for i, file in enumerate(frames))
    assert source_line(node) == "resnet.py:11"


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        *[(0, "0 B"), (2**20 - 1, "1048575 B"), (2**20, "1 MiB"), (3 * 2**19, "1.5 MiB"), (45 * 2**28, "11.25 GiB")],
        *[(15.3e12, "13.92 TiB"), (30e15, "26.65 PiB")],
    ],
)
def test_sizes_are_readable(nbytes: float, text: str) -> None:
    assert format_bytes(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *[(0, "0 ms"), (0.9994, "999 ms"), (0.9996, "1 s"), (4.94, "4.94 s"), (599.6, "600 s"), (1200, "20 min")],
        *[(5400, "1.5 hours"), (2.5e6, "28.9 days"), (1e9, "31.7 years"), (1e12, "31700 years")],
    ],
)
def test_times_are_readable(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def folded(found: list[Row]) -> list[str]:
    return [row.cells[1] for row in fold(found)]


def test_only_neighbours_are_folded() -> None:
    assert folded(rows("h.0.a", "h.0.b", "h.1.a", "h.1.b", "h.2.a")) == ["h.{0..1}.a x 2", "h.{0..1}.b x 2", "h.2.a"]
    assert folded(rows("h.0", "", "h.1")) == ["h.0", "", "h.1"]
    assert folded(rows("h.0", "h.2")) == ["h.0", "h.2"]
    assert folded(rows("h.1", "h.0")) == ["h.1", "h.0"]
    assert folded(rows("encoder.0", "decoder.1")) == ["encoder.0", "decoder.1"]
    assert folded([*rows("h.0"), *rows("h.1", size="9 B")]) == ["h.0", "h.1"]


def test_a_number_further_inside_is_no_layer() -> None:
    found = rows("h.0.experts.0", "h.0.experts.1", "h.1.experts.0", "h.1.experts.1")
    assert folded(found) == ["h.{0..1}.experts.0 x 2", "h.{0..1}.experts.1 x 2"]


def test_names_that_are_numbers() -> None:
    """Those of `nn.Sequential`."""
    assert folded(rows("0", "1", "2")) == ["{0..2} x 3"]
