"""`ssd_fx.checkpoint`: to the bit PyTorch's checkpoint, whose inputs are not in memory between forward and backward."""

from __future__ import annotations

import contextlib
import gc
import json
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, set_checkpoint_early_stop
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import ssd_fx
from ssd_fx import will_recompute
from ssd_fx.report.text import lines
from ssd_fx.runtime import entries
from ssd_fx.runtime.states import Entry
from tests import sources
from tests.bitwise import assert_same_bits, prove_bitwise, run
from tests.faults.toys import settle
from tests.passes import toys

WIDTH, ROWS = 32, 64
Region = Callable[..., Any]  # `checkpoint` with its options given


class Block(nn.Module):
    """A product, gelu, dropout and another product, with a way around."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, WIDTH))

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        found = x + self.inner(x)
        return found if scale is None else found * scale


class Net(nn.Module):
    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, region: Region, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = region(block, x)
        return x.square().mean()


Program = Callable[[Region], list[Tensor]]


def batch() -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()


def trained(run: Callable[[Net, Tensor], Tensor | None]) -> list[Tensor]:
    """The gradients of two steps; a backward begins when all that was stored is on disk."""
    net, seen = Net(), list[Tensor]()
    for step in range(2):
        torch.manual_seed(step)
        x = batch()
        loss = run(net, x)
        settle()
        if loss is not None:
            loss.backward()
        seen += [p.grad.clone() for p in (x, *net.parameters()) if p.grad is not None]
    return seen


def plain(region: Region) -> list[Tensor]:
    return trained(lambda net, x: net(region, x))


def under_autocast(region: Region) -> list[Tensor]:
    def run(net: Net, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return net(region, x)

    return trained(run)


def nested(region: Region) -> list[Tensor]:
    """The inner checkpoint is within the outer one, which computes it again."""

    def run(net: Net, x: Tensor) -> Tensor:
        first, second, third = net.blocks
        return region(lambda y: third(region(second, region(first, y))), 2 * x).square().mean()  # type: ignore[no-any-return]

    return trained(run)


def within_torchs(region: Region) -> list[Tensor]:
    def run(net: Net, x: Tensor) -> Tensor:
        return torch_checkpoint(lambda y: net(region, y), x, use_reentrant=False)  # type: ignore[no-any-return]

    return trained(run)


def without_early_stop(region: Region) -> list[Tensor]:
    def run(net: Net, x: Tensor) -> Tensor:
        with set_checkpoint_early_stop(False):
            return net(region, x)

    return trained(run)


def selective(region: Region) -> list[Tensor]:
    contexts = toys.choosing({torch.ops.aten.addmm.default: CheckpointPolicy.MUST_SAVE})
    return trained(lambda net, x: net(partial(region, context_fn=contexts), x))


def graph_kept(region: Region) -> list[Tensor]:
    """Two backwards through all of it."""

    def run(net: Net, x: Tensor) -> None:
        loss = net(region, x)
        settle()
        loss.backward(retain_graph=True)
        loss.backward()

    return trained(run)


def several_of_which_one_is_dropped(region: Region) -> list[Tensor]:
    """Forwards before the first backward. The first of them is gone when the last begins, which has its names."""

    def run(net: Net, x: Tensor) -> None:
        losses = [net(region, x * i) for i in range(3)]
        del losses[0]
        losses.append(net(region, x * 4))
        settle()
        for loss in losses:
            loss.backward()

    return trained(run)


def two_outputs_one_after_the_other(region: Region) -> list[Tensor]:
    """Two backwards, each through another output: the function runs again for each, though no graph is kept."""

    def run(net: Net, x: Tensor) -> None:
        a, b = region(lambda y: (net.blocks[0](y), net.blocks[1](y).sin()), x.clone())
        settle()
        a.square().sum().backward()
        b.square().sum().backward()

    return trained(run)


def several_arguments(region: Region) -> list[Tensor]:
    """A tensor twice, a transposed one, one without a gradient, a keyword, and what is no tensor."""

    def call(x: Tensor, again: Tensor, turned: Tensor, mask: Tensor, power: int, *, scale: Tensor) -> Tensor:
        return (x * again + turned.t()).masked_fill(mask, 0.0).pow(power) * scale

    def run(net: Net, x: Tensor) -> Tensor:
        y, mask = net.blocks[0](x), torch.arange(ROWS * WIDTH).view(ROWS, WIDTH) % 3 == 0
        found: Tensor = region(call, y, y, (2 * x).t(), mask, 3, scale=x.exp())
        return found.sum()

    return trained(run)


def views(region: Region) -> list[Tensor]:
    """Halves of one tensor, and one that is read with gaps."""

    def run(net: Net, x: Tensor) -> Tensor:
        left, right = net.blocks[0](x).chunk(2, dim=1)
        found: Tensor = region(lambda a, b, c: (a.sin() * b + c.cos()).sum(), left, right, (3 * x)[:, ::2])
        return found

    return trained(run)


def from_a_plain_object(region: Region) -> list[Tensor]:
    """Nothing shows before the first call that the object's parameters need gradients."""

    def run(net: Net, x: Tensor) -> Tensor:
        return net(region, region(Holder(net.blocks[0]).run, x.detach()))

    return trained(run)


class Holder:
    """An object that is no module, and has one."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def run(self, x: Tensor) -> Tensor:
        return self.module(x)  # type: ignore[no-any-return]


PROGRAMS: tuple[Program, ...] = (
    plain,
    under_autocast,
    nested,
    within_torchs,
    without_early_stop,
    selective,
    graph_kept,
    several_of_which_one_is_dropped,
    two_outputs_one_after_the_other,
    several_arguments,
    views,
    from_a_plain_object,
)
STAYS = (within_torchs,)  # the checkpoint around it drops what is saved within


TORCHS: Region = partial(torch_checkpoint, use_reentrant=False)


@pytest.mark.parametrize("program", [p for p in PROGRAMS if p not in STAYS])
def test_every_program_under_every_source(program: Program) -> None:
    prove_bitwise(program, [TORCHS, partial(ssd_fx.checkpoint, options=sources.OPTIONS)], sources.ALL)


@pytest.fixture
def region(tmp_path: Path) -> Region:
    return partial(ssd_fx.checkpoint, options={"dirs": [str(tmp_path)], "min_bytes": 0, "allow_tmpfs": True})


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_program_on_a_disk(program: Program, region: Region) -> None:
    prove_bitwise(program, [TORCHS, region])
    stats = ssd_fx.stats()
    assert (stats.read_bytes > 0) == (program not in STAYS)
    assert not entries.living()


def is_gone(entry: Entry) -> bool:
    with entries.GUARD.lock:
        entry.store.writer.reap()
    return entry.held is None


def test_inputs_are_gone_between_forward_and_backward(region: Region) -> None:
    """Those of all blocks but the first, whose input the caller has."""
    net, x = Net(), batch()
    for _ in range(2):
        loss = net(region, x)
        settle()
        assert sum(is_gone(entry) for entry in entries.living()) == len(net.blocks) - 1
        loss.backward()
    assert ssd_fx.stats().freed_bytes == 2 * (len(net.blocks) - 1) * ROWS * WIDTH * 4


def test_the_next_input_is_read_ahead(region: Region) -> None:
    net = Net(4)
    for _ in range(2):
        loss = net(region, batch() * 1)
        settle()
        loss.backward()
    stats = ssd_fx.stats()
    assert stats.prefetched_bytes == stats.read_bytes - 2 * ROWS * WIDTH * 4, "all but that of the last block"


def test_small_inputs_and_leaves_stay(tmp_path: Path) -> None:
    options = {"dirs": [str(tmp_path)], "allow_tmpfs": True}
    small = partial(ssd_fx.checkpoint, options=options | {"min_bytes": ROWS * WIDTH * 4 + 1})
    prove_bitwise(plain, [TORCHS, small])
    weight = nn.Parameter(torch.ones(64))
    leaf = partial(ssd_fx.checkpoint, options=options | {"min_bytes": 1})
    leaf(torch.exp, weight).sum().backward()
    assert ssd_fx.stats().stores == 0


@pytest.mark.parametrize("nbytes", [0, 1 << 30], ids=["stored", "kept"])
def test_an_input_that_is_changed_in_place_is_an_error(nbytes: int, tmp_path: Path) -> None:
    """PyTorch's checkpoint raises as well. Under hooks, autograd itself compares no versions."""
    options = {"dirs": [str(tmp_path)], "allow_tmpfs": True, "min_bytes": nbytes}
    for region in (TORCHS, partial(ssd_fx.checkpoint, options=options)):
        x = batch() * 1
        y = region(torch.exp, region(torch.sin, x))
        with torch.no_grad():
            x.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


class Broken(Exception):
    pass


def test_an_exception_leaves_nothing_behind(region: Region) -> None:
    """In the forward, and in the second run of the function."""
    runs = 0

    def breaks(x: Tensor) -> Tensor:
        nonlocal runs
        runs += 1
        if runs in (1, 3):
            raise Broken
        return x.exp()

    for _ in range(2):  # the second call's function runs again in the backward
        with pytest.raises(Broken):
            region(breaks, region(torch.sin, batch() * 1)).sum().backward()
    gc.collect()
    assert not entries.living()


def test_a_graph_that_is_dropped_leaves_nothing_behind(region: Region) -> None:
    loss = Net()(region, batch())
    assert entries.living()
    del loss
    gc.collect()
    assert not entries.living()


def test_threads_have_checkpoints_of_their_own(region: Region) -> None:
    def gradients(region: Region) -> list[Tensor]:
        net = Net().eval()
        net(region, batch()).backward()
        return [p.grad for p in net.parameters() if p.grad is not None]

    expected, found = gradients(TORCHS), list[list[Tensor]]()

    def work(net: Net) -> None:
        for _ in range(5):
            net.zero_grad()
            net(region, batch()).backward()
            found.append([p.grad.clone() for p in net.parameters() if p.grad is not None])

    # made here: a checkpoint sets the state of the one generator that weights are drawn from
    threads = [threading.Thread(target=work, args=(Net().eval(),)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 15
    for each in found:
        assert_same_bits(each, expected)


def test_without_gradients_nothing_is_stored(region: Region) -> None:
    with torch.no_grad():
        Net()(region, batch())
    assert ssd_fx.stats().stores == 0


@pytest.mark.parametrize("inner", ["aot_eager", "ssd_fx"])
def test_around_compiled_blocks(inner: str, region: Region, tmp_path: Path) -> None:
    """The most common set-up of long training: every block compiled by itself, and checkpointed."""
    options = {"dirs": [str(tmp_path)], "min_bytes": 0, "allow_tmpfs": True, "inner": "aot_eager"}

    def compiled(region: Region) -> list[Tensor]:
        backend: dict[str, Any] = {"backend": inner}
        if inner == "ssd_fx":
            backend = {"backend": ssd_fx.backend, "options": options}
        net = Net().eval()  # without dropout, whose numbers eager mode and compiled code draw otherwise
        blocks = [torch.compile(block, **backend) for block in net.blocks]
        seen = []
        for _ in range(2):
            x = batch()
            y: Tensor = x
            for block in blocks:
                y = region(block, y)
            settle()
            y.square().mean().backward()
            seen += [p.grad.clone() for p in (x, *net.parameters()) if p.grad is not None]
        return seen

    with pytest.warns(RuntimeWarning, match="keeps all tensors") if inner == "ssd_fx" else contextlib.nullcontext():
        expected = run(compiled, TORCHS)
    assert ssd_fx.stats().stores == 0
    whole = ssd_fx.stats().whole_graphs
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the checkpoint is ours: nothing is to be changed
        assert_same_bits(run(compiled, region), expected)
    assert ssd_fx.stats().read_bytes > 0
    assert ssd_fx.stats().whole_graphs == whole


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_what_was_compiled_outside_writes_nothing_within_a_checkpoint(inner: str, tmp_path: Path) -> None:
    """What it saves is dropped when the checkpoint ends, and computed again right before it is needed."""
    options = {"dirs": [str(tmp_path)], "min_bytes": 0, "budget": 0, "allow_tmpfs": True, "inner": inner}
    net = Net().eval()
    blocks = [torch.compile(block, backend=ssd_fx.backend, options=options, dynamic=False) for block in net.blocks]

    def step(region: Region) -> list[Tensor]:
        x = batch()
        y: Tensor = x
        for block in blocks:
            y = region(block, y)
        settle()
        grads = torch.autograd.grad(y.square().mean(), [x, *net.parameters()])
        settle()
        return list(grads)

    expected = step(lambda block, x: block(x))
    written = ssd_fx.stats().written_bytes
    assert written > 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is compiled within
        for _ in range(3):
            assert_same_bits(step(TORCHS), expected)
    assert ssd_fx.stats().written_bytes == written
    assert_same_bits(step(lambda block, x: block(x)), expected)
    assert ssd_fx.stats().written_bytes == 2 * written


def stores(call: Callable[[], object]) -> int:
    before = ssd_fx.stats().stores
    call()
    return ssd_fx.stats().stores - before


def test_frozen_blocks_write_nothing_and_are_blamed_for_nothing(
    region: Region, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing of them is computed again. Names are those of the calls that store."""
    net = Net(2)
    net.blocks[0].requires_grad_(False)
    for _ in range(6):
        net(region, batch().detach()).backward()
    assert {name: graph.stores for name, graph in ssd_fx.stats().graphs.items()} == {"checkpoint 0": 6}
    net.blocks[0].requires_grad_(True)
    assert stores(lambda: net(region, batch().detach()).backward()) == 2
    assert not caplog.records


def test_where_all_checkpoints_are_frozen_nothing_is_written(region: Region) -> None:
    """No backward of a checkpoint ever comes, which would end a step."""
    body, head = Block().requires_grad_(False), nn.Linear(WIDTH, 1)
    for _ in range(5):
        head(region(body, batch().detach())).sum().backward()
    assert not ssd_fx.stats().graphs


def test_a_network_that_is_frozen_in_every_other_step(region: Region) -> None:
    """As a generator, while its discriminator is trained: each of its inputs is stored when it is needed, and then
    only."""
    generator, discriminator = Block(), nn.Linear(WIDTH, 1)

    def step() -> None:
        made = region(generator, batch().detach())
        region(discriminator, made).sum().backward()

    found = []
    for i in range(6):
        generator.requires_grad_(i % 2 == 1)
        found.append(stores(step))
    assert found == 3 * [1, 2]
    assert ssd_fx.stats().loads == ssd_fx.stats().stores


def test_the_same_where_nothing_shows_that_it_is_frozen(region: Region) -> None:
    """Then the input is stored when the function has returned. It leaves memory all the same."""
    block = Block()

    def step() -> None:
        y = region(Holder(block).run, batch().detach())
        settle()
        assert sum(is_gone(entry) for entry in entries.living()) == block.inner[0].weight.requires_grad
        if y.requires_grad:
            y.sum().backward()

    found = []
    for i in range(6):
        block.requires_grad_(i % 2 == 1)
        found.append(stores(step))
    assert found == 3 * [0, 1]


def test_a_function_whose_result_is_cut_off_is_stored_once(region: Region) -> None:
    """Its argument needs a gradient, so one sees only behind the call that no backward comes."""

    def cut(x: Tensor) -> Tensor:
        return x.detach().sin()

    assert [stores(lambda: region(cut, batch() * 1)) for _ in range(5)] == [1, 0, 0, 0, 0]


def test_a_result_that_torch_cannot_look_into(region: Region) -> None:
    """It needs a gradient, which an object hides that is no tuple, list or dict."""
    block = Block().eval()

    def hidden(x: Tensor) -> Holder:
        held = Holder(block)
        held.result = block(x)  # type: ignore[attr-defined]
        return held

    def step() -> None:
        region(hidden, batch() * 1).result.sum().backward()

    assert [stores(step) for _ in range(3)] == [1, 1, 1]


def test_what_was_cut_off_once_is_stored_early_again(region: Region, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(will_recompute, "AGAIN", 2)
    seen = list[int]()

    def sometimes(x: Tensor, is_cut: bool) -> Tensor:
        seen.append(ssd_fx.stats().stores)
        return x.detach() if is_cut else x.sin()

    for is_cut in (True, False, False, False):
        region(sometimes, batch() * 1, is_cut)
    assert seen == [1, 1, 2, 4], "stores so far when the function runs"


def test_an_argument_that_is_changed_before_it_is_stored_is_an_error(region: Region) -> None:
    block = Block()

    def changes(held: Holder, x: Tensor) -> Tensor:
        return held.run(x.add_(1))

    y = region(changes, Holder(block), batch().detach())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_what_is_learned_keeps_no_module(region: Region) -> None:
    block = Block()
    gone = weakref.ref(block)

    def cut(block: Block, x: Tensor) -> Tensor:
        return block(x).detach()  # type: ignore[no-any-return]

    region(partial(cut, block), batch() * 1)
    assert cut.__code__ in {code for code, _ in will_recompute._doubts}
    del block, cut
    gc.collect()
    assert gone() is None


def test_an_evaluation_that_could_have_a_backward_is_named(region: Region, caplog: pytest.LogCaptureFixture) -> None:
    """Its calls have the same few names again and again: two sets, while the last loss lives."""
    net = Net(3)
    for _ in range(12):
        loss = net(region, batch())
        settle()
    assert loss.requires_grad
    assert len(ssd_fx.stats().graphs) <= 2 * len(net.blocks)
    assert "call 0 of ssd_fx.checkpoint in a step has run 4 times in a row" in caplog.text


def test_no_two_living_calls_of_a_step_have_one_name(region: Region) -> None:
    """Also if the first one of a step is dropped: what is learned of a name is learned of one call."""
    net, x = Net(), batch() * 1
    dropped = region(net.blocks[0], x)
    first = region(net.blocks[0], x)
    del dropped
    second = region(net.blocks[1], first)
    loss = region(net.blocks[2], second).sum()
    living = [entry.graph for entry in entries.living()]
    assert len(living) == len(set(living)) == 3
    loss.backward()


def test_a_branch_without_a_loss_is_named(region: Region, caplog: pytest.LogCaptureFixture) -> None:
    net = Net(2)
    for _ in range(6):
        x = region(net.blocks[0], batch() * 1)
        branch = region(net.blocks[1], x * 1)  # nobody else holds what it takes in, so it is written every time
        settle()
        x.sum().backward()
        del branch
    (said,) = [record.message for record in caplog.records]
    assert said.startswith("call 1 of ssd_fx.checkpoint in a step has run 4 times in a row, and no backward")


def test_a_report_without_compiled_graphs(region: Region, tmp_path: Path) -> None:
    """Says what was measured, and that there is no plan."""
    for _ in range(2):
        loss = Net()(region, batch())
        settle()
        loss.backward()
    assert set(ssd_fx.stats().graphs) == {"checkpoint 0", "checkpoint 1"}, "the first block's input is a leaf"
    found = ssd_fx.report()
    said = dict(lines(found))
    assert said["memory"] == "16384 B of 16384 B a step leave memory between forward and backward"
    assert said["plan"] == "ssd_fx.checkpoint ran alone, which plans nothing: all arguments from min_bytes on leave"
    assert [*said] == ["memory", "cost", "drive", "plan", "next"]
    assert "2 steps, 2 graphs" in str(found)
    found.save(tmp_path / "report.html")
    assert json.loads(json.dumps(found.to_dict()))["lines"] == said


def test_compiled_around_it_is_pytorchs(region: Region) -> None:
    """The compiler traces the checkpoint, and decides itself what is stored."""
    net = Net().eval()

    def step(region: Region) -> tuple[Tensor, ...]:
        x = batch()
        compiled = torch.compile(lambda x: net(region, x), backend="aot_eager", fullgraph=True)
        return torch.autograd.grad(compiled(x), [x])

    prove_bitwise(step, [TORCHS, region])
    assert ssd_fx.stats().stores == 0


def test_a_graph_break_within_it(region: Region) -> None:
    """Compiled code calls it then, as Python would."""
    net = Net().eval()

    def broken(block: Block, x: Tensor) -> Tensor:
        x = block(x)
        torch._dynamo.graph_break()
        return x.sin()

    def step(region: Region) -> list[Tensor]:
        torch._dynamo.reset()

        def called(x: Tensor) -> Tensor:
            for block in net.blocks:
                x = region(partial(broken, block), x)
            return x.square().mean()

        x = batch()
        loss = torch.compile(called, backend="aot_eager")(x.sin())
        settle()
        return list(torch.autograd.grad(loss, [x, *net.parameters()]))

    expected = step(TORCHS)
    assert ssd_fx.stats().stores == 0
    with warnings.catch_warnings(record=True) as said:
        assert_same_bits(step(region), expected)
    assert not [each for each in said if "Dynamo does not know" in str(each.message)], "it reads none of our code"
    assert ssd_fx.stats().stores == ssd_fx.stats().loads == len(net.blocks)


@pytest.fixture
def no_options_known() -> Iterator[None]:
    yield
    ssd_fx.checkpoints._known.clear()


@pytest.mark.usefixtures("no_options_known")
def test_bad_input() -> None:
    x = batch() * 1
    with pytest.raises(ValueError, match="right would be use_reentrant=False"):
        ssd_fx.checkpoint(torch.exp, x, use_reentrant=True)
    with pytest.raises(ValueError, match="no option 'dir'; did you mean 'dirs'"):
        ssd_fx.checkpoint(torch.exp, x, options={"dir": "/x"})
    with pytest.raises(OSError, match="/nowhere"):
        ssd_fx.checkpoint(torch.exp, x, options={"dirs": ["/nowhere"]})
    with pytest.raises(ValueError, match="determinism_check should be one of"):
        ssd_fx.checkpoint(torch.exp, x, determinism_check="sometimes")
