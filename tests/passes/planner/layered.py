"""Random steps of equal layers, as of a transformer, on drives that are slower than compute.

    attention   x -> norm -> [product] -> q, kv -> attention, logsumexp -> [product] -> sum
    gated       x -> norm -> [product] -> gate, up -> act -> [product] -> sum
    plain       x -> norm -> up -> act -> [product] -> sum

Products and attention are dear, norms and pointwise operators cheap. What stands in brackets is not saved: the
chains of what is made of it have it in common.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

from ssd_fx.passes.axis import CHOICES, Choice, Item, Step
from tests.passes.planner.instances import Instance, random_machine, shared_nodes

BLOCKS = {"attention": ["attention"], "plain": ["plain"], "gated": ["gated"], "both": ["attention", "plain"]}
SLOWEST = 10.0  # seconds of a lane per second of compute; the fastest drive is as fast as compute


@dataclass(frozen=True)
class Operator:
    """One of the forward: the tensors that it reads and makes, and those that its backward reads."""

    seconds: float
    reads: tuple[str, ...]
    makes: tuple[str, ...]
    needs: tuple[str, ...]


@dataclass
class Forward:
    """The operators, and the bytes of every tensor."""

    operators: list[Operator] = field(default_factory=list)
    nbytes: dict[str, int] = field(default_factory=dict)

    def add(self, seconds: float, reads: str, makes: dict[str, float], needs: str = "") -> None:
        self.nbytes |= {name: int(nbytes) for name, nbytes in makes.items()}
        self.operators.append(Operator(seconds, tuple(reads.split()), tuple(makes), tuple(needs.split())))

    def step(self) -> Step:
        """Every operator's backward takes twice its time, in the opposite order, and holds the gradients of what it
        made and read."""
        count = len(self.operators)
        made = {name: p for p, op in enumerate(self.operators) for name in op.makes}
        saved = list(dict.fromkeys(name for op in self.operators for name in op.needs))
        saved.sort(key=lambda name: (made[name], -self.nbytes[name]))
        chains = [self._chain(name, made, saved) for name in saved]
        items = []
        for name, chain in zip(saved, chains, strict=True):
            last = max(p for p, op in enumerate(self.operators) if name in op.reads or name in op.makes)
            users = [2 * count - 1 - p for p, op in enumerate(self.operators) if name in op.needs]
            needs = {read for p in chain for read in self.operators[p].reads if read in saved}
            again_s, choices = math.fsum(self.operators[p].seconds for p in chain), CHOICES
            if not chain:  # the input
                again_s, choices = math.inf, frozenset({Choice.KEEP, Choice.OFFLOAD})
            needed = tuple(sorted(saved.index(each) for each in needs))
            ends = min(users), max(users)
            items.append(Item(self.nbytes[name], made[name], last, *ends, again_s, choices, needed))
        seconds = [op.seconds for op in self.operators]
        held = [sum(self.nbytes[name] for name in {*op.reads, *op.makes}) for op in self.operators]
        extra = [sum(self.nbytes[name] for name in op.makes if name not in saved) for op in self.operators]
        return Step(
            (*seconds, *(2 * s for s in reversed(seconds))),
            (*extra, *reversed(held)),
            count,
            tuple(items),
            shared=shared_nodes(seconds, [set(chain) for chain in chains]),
        )

    def _chain(self, name: str, made: dict[str, int], saved: list[str]) -> set[int]:
        """The operators between a tensor and what is saved; none for the input of the forward."""
        p = made[name]
        if not self.operators[p].reads:
            return set()
        between = (read for read in self.operators[p].reads if read not in saved)
        return {p}.union(*(self._chain(read, made, saved) for read in between))


def layered_instance(seed: int, layers: tuple[int, int] = (2, 4)) -> Instance:
    """The instance of a seed: the same on every machine."""
    rng = random.Random(seed)
    kind = rng.choice(list(BLOCKS))
    blocks = BLOCKS[kind] * max(2, rng.randint(*layers) // len(BLOCKS[kind]))
    forward = Forward()
    width = 10 ** rng.uniform(5.0, 6.0)
    pointwise_s = rng.uniform(0.5, 2.0) * 1e-10  # per byte
    product_s = pointwise_s * rng.choice([2.0, 5.0, 10.0])
    attention_s = product_s * rng.choice([1.0, 3.0, 8.0])
    widen = rng.choice([2, 3, 4])
    keys = rng.choice([0.5, 2.0])
    forward.add(0.1 * pointwise_s * width, "", {"x0": width})
    for at, block in enumerate(blocks):
        x, y, n, wide, act, out = f"x{at}", f"x{at + 1}", f"norm{at}", f"wide{at}", f"act{at}", f"out{at}"
        forward.add(pointwise_s * 2 * width, x, {n: width}, x)
        if block == "attention":
            q, kv, lse = f"q{at}", f"kv{at}", f"lse{at}"
            forward.add(product_s * (1 + keys) * width, n, {wide: (1 + keys) * width}, n)
            forward.add(pointwise_s * 2 * width, wide, {q: width})
            forward.add(pointwise_s * 2 * keys * width, wide, {kv: keys * width})
            forward.add(attention_s * width, f"{q} {kv}", {act: width, lse: width / 16}, f"{q} {kv} {act} {lse}")
        elif block == "gated":
            gate, up = f"gate{at}", f"up{at}"
            forward.add(product_s * 2 * widen * width, n, {wide: 2 * widen * width}, n)
            forward.add(pointwise_s * widen * width, wide, {gate: widen * width})
            forward.add(pointwise_s * widen * width, wide, {up: widen * width})
            forward.add(pointwise_s * 3 * widen * width, f"{gate} {up}", {act: widen * width}, f"{gate} {up}")
        else:
            forward.add(product_s * widen * width, n, {wide: widen * width}, n)
            forward.add(pointwise_s * 2 * widen * width, wide, {act: widen * width}, wide)
        forward.add(product_s * width * (1 if block == "attention" else widen), act, {out: width}, act)
        forward.add(pointwise_s * 3 * width, f"{x} {out}", {y: width})
    last = f"x{len(blocks)}"
    forward.add(product_s * rng.uniform(0.5, 4.0) * width, last, {"loss": 8}, last)
    step, slower = forward.step(), SLOWEST ** rng.random()
    return Instance(f"{seed}-{kind}x{len(blocks)}-1/{slower:.1f}", step, random_machine(rng, step, (slower, slower)))
