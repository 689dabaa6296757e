"""The keys of compile caches: what a partitioner only tells is in none, and what ranks must do together in all."""

from __future__ import annotations

import pickle
from dataclasses import replace
from functools import partial

import torch

from ssd_fx.passes.options import PlanOptions
from ssd_fx.passes.partition import Partition
from ssd_fx.passes.partitioner import Partitioner, Rewritten
from ssd_fx.passes.plan import Plan


def about(line: str, partition: Partition, plan: Plan, options: PlanOptions) -> str:
    return line


def log(line: str, rewritten: Rewritten) -> None:
    return


def partitioner(line: str, options: PlanOptions) -> Partitioner:
    return Partitioner(options, about=partial(about, line), log=partial(log, line))


def test_a_comment_above_the_model_compiles_nothing_again() -> None:
    """It moves the lines that reports name. Inductor pickles the partitioner for its keys."""
    options = PlanOptions(version="", budget=0, min_bytes=0, prefetch=0, runtime_config="")
    here, moved = (partitioner(line, options) for line in ("Block.forward gpt.py:12", "Block.forward gpt.py:13"))
    assert pickle.dumps(here) == pickle.dumps(moved)
    assert here.uuid() == moved.uuid()
    assert pickle.dumps(here) != pickle.dumps(partitioner("", replace(options, min_bytes=123)))


def test_where_ranks_exchange_what_they_save_no_cached_result_is_taken() -> None:
    """Directories and rates are a rank's own. One that found its graph in the cache would leave the others waiting."""
    options = PlanOptions(version="", budget=0, min_bytes=0, prefetch=0, runtime_config="")
    alone = Partitioner(options).uuid()
    with torch._functorch.config.patch(_sync_decision_cross_ranks=True):
        exchanged = Partitioner(options).uuid()
    assert alone == Partitioner(options).uuid() != exchanged
