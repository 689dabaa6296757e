"""Random training steps: memory rises and falls, some lives long, some is cheap to recompute; three speeds of drive."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st

from ssd_fx.passes.axis import CHOICES, Choice, Item, Shared, Step
from ssd_fx.passes.cost.machine import Machine
from ssd_fx.passes.planner.budget import limits as limits  # what a share is in bytes
from ssd_fx.passes.planner.replay import first_uses
from ssd_fx.passes.schedule import Schedule, Trip

BUDGETS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
LANES = {"fast": (0.2, 0.6), "balanced": (0.8, 1.3), "slow": (1.6, 4.0)}  # seconds of the lane per second of compute


@dataclass(frozen=True)
class Instance:
    """A step, the machine that runs it, and what made it."""

    name: str
    step: Step
    machine: Machine


def random_instance(seed: int, items: tuple[int, int] = (4, 9), operators: tuple[int, int] = (8, 16)) -> Instance:
    """The instance of a seed: the same on every machine."""
    rng = random.Random(seed)
    count = rng.randint(*operators)
    forward = max(2, round(count * rng.uniform(0.35, 0.5)))
    seconds = tuple(10 ** rng.uniform(-3.5, -2.0) * (1.0 if p < forward else 2.0) for p in range(count))
    kind = rng.choice(["plain", "plain", "recompute", "restricted"])
    made = tuple(random_item(rng, seconds, forward, kind) for _ in range(rng.randint(*items)))
    made = tuple(sorted(made, key=lambda item: (item.produced, item.last_use, item.first_use)))
    scale = sum(item.nbytes for item in made) / len(made)
    base = [int(scale * rng.uniform(0.5, 1.0))] * count
    for _ in range(rng.randint(0, 3)):  # transients: a hump of a few operators
        at, width, height = rng.randrange(count), rng.randint(1, 3), rng.uniform(0.3, 3.0)
        for p in range(at, min(at + width, count)):
            base[p] += int(scale * height)
    step = Step(seconds, tuple(base), forward, made)
    speed = rng.choice(list(LANES))
    return Instance(f"{seed}-{kind}-{speed}", step, random_machine(rng, step, LANES[speed]))


def chained_instance(seed: int, items: tuple[int, int] = (4, 9), operators: tuple[int, int] = (8, 16)) -> Instance:
    """The random one of a seed, most of whose items are recomputed from others, by nodes that several chains have."""
    found = random_instance(seed, items, operators)
    rng = random.Random(seed)
    nodes = [rng.uniform(0.05, 1.0) * max(found.step.seconds) for _ in range(3)]
    made, chains = list[Item](), list[set[int]]()
    for item in found.step.items:
        before = [j for j, other in enumerate(made) if other.produced < item.produced]
        needs = tuple(j for j in before if rng.random() < 0.5)
        chain = {n for n in range(len(nodes)) if rng.random() < 0.5}
        if rng.random() < 0.2:
            chains.append(set())
            made.append(item if Choice.RECOMPUTE not in item.choices else replace(item, recompute_s=0.0))
        else:
            chains.append(chain)
            again_s = math.fsum(nodes[n] for n in chain)
            made.append(replace(item, recompute_s=again_s, choices=item.choices | {Choice.RECOMPUTE}, needs=needs))
    return replace(found, step=replace(found.step, items=tuple(made), shared=shared_nodes(nodes, chains)))


def shared_nodes(nodes: Sequence[float], chains: Sequence[set[int]]) -> tuple[Shared, ...]:
    """The nodes, by their seconds, that several of the items have in their chains."""
    by_node = [tuple(i for i, chain in enumerate(chains) if n in chain) for n in range(len(nodes))]
    return tuple(Shared(nodes[n], sharing) for n, sharing in enumerate(by_node) if len(sharing) > 1)


def random_item(rng: random.Random, seconds: tuple[float, ...], forward: int, kind: str) -> Item:
    """An activation: first produced, last used; one in four lives on in the forward as a skip connection does."""
    count = len(seconds)
    produced = rng.randrange(forward)
    last = min(forward - 1, produced + (rng.randint(2, forward) if rng.random() < 0.25 else rng.randint(0, 1)))
    mirror = forward + round((forward - 1 - produced) / max(1, forward - 1) * (count - forward - 1))
    first = min(count - 1, max(forward, mirror + rng.randint(-2, 1)))
    until = min(count - 1, first + rng.randint(0, 2))
    nbytes = int(10 ** rng.uniform(5.0, 7.0))
    dear = rng.choice([0.1, 0.5, 1.0, 4.0]) * seconds[produced]
    recompute_s, choices = math.inf, {Choice.KEEP, Choice.OFFLOAD}
    if kind == "recompute" and rng.random() < 0.5:
        recompute_s, choices = dear, {*CHOICES}
    elif kind == "restricted":
        recompute_s = dear
        sets = [{Choice.KEEP}, {Choice.OFFLOAD}, {Choice.RECOMPUTE}, {Choice.RECOMPUTE, Choice.OFFLOAD}, {*CHOICES}]
        choices = rng.choice([*sets, {Choice.KEEP, Choice.RECOMPUTE}, {Choice.KEEP, Choice.OFFLOAD}])
        recompute_s = dear if Choice.RECOMPUTE in choices else math.inf
    return Item(nbytes, produced, last, first, until, recompute_s, frozenset(choices))


def random_machine(rng: random.Random, step: Step, lane: tuple[float, float]) -> Machine:
    """A drive that needs `lane` seconds to move everything per second of the graph that it moves it beside."""
    total = sum(item.nbytes for item in step.items)
    before, behind = sum(step.seconds[: step.forward]), sum(step.seconds[step.forward :])
    latency_s, node_s, drag = rng.choice([(0.0, 0.0, 0.0), (1e-4, 1e-5, 0.0), (3e-4, 2e-5, 0.05), (1e-3, 0.0, 0.1)])
    write_bw = total / (before * rng.uniform(*lane))
    read_bw = total / (behind * rng.uniform(*lane))
    return Machine(1e12, 1e10, write_bw, read_bw, latency_s, node_s, drag / write_bw)


def cases(count: int) -> Iterator[tuple[Instance, float]]:
    """Every instance of the first `count` seeds at every budget."""
    for seed in range(count):
        instance = random_instance(seed)
        for share in BUDGETS:
            yield instance, share


def scheduled(step: Step, choices: Sequence[Choice], placed: Mapping[int, Mapping[str, Any]]) -> Schedule:
    """What is offloaded at these places, as `Trip.of` takes them, and waited for where it is used."""
    firsts = first_uses(step, choices)
    return Schedule([Trip.of(i, wait=firsts[i], **each) for i, each in placed.items()], step.items)


def undeferred(choices: Sequence[Choice]) -> tuple[Choice, ...]:
    """What is deferred is offloaded."""
    return tuple(Choice.OFFLOAD if choice is Choice.DEFER else choice for choice in choices)


instances = st.integers(0, 2**32 - 1).map(random_instance)
"""The same instances as a hypothesis strategy; shrinking looks for a small seed, not for a small step."""
