"""Other people's models train with everything saved on disk, and compute what they compute with everything kept.

    make zoo                          all of them; a few are in the default suite
    pytest tests/zoo -k "Llama"       one

`aot_eager`: bitwise the same partition's kernels with everything kept. Inductor: bitwise the same generated code on the
engine "memory", which moves no bytes; and near plain Inductor, whose kernels are cut elsewhere.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="the zoo needs pip install -e '.[zoo]'")

from tests import sources
from tests.bitwise import differences, kept, ours, prove_bitwise, stock
from tests.compatibility import Result, record
from tests.passes.recomputing import SLOW
from tests.zoo.models import MODELS
from tests.zoo.trial import Training, Trial, near, trial

FAST = ("GPT-2", "BERT")  # with dropout and eager kernels: twenty seconds each
LEAST_OFFLOADED = 0.9  # of the saved bytes: what cannot leave is small


def case(name: str, dropout: float) -> Any:
    return pytest.param(name, dropout, marks=() if name in FAST and dropout else pytest.mark.zoo)


def options(directory: Path, **more: Any) -> dict[str, Any]:
    return {"dirs": [str(directory)], "min_bytes": 0, "budget": 0.0} | more


def compared(what: str, inner: str, found: Trial, reference: Trial) -> None:
    apart = differences(found.values, reference.values)
    sizes = found.saved_bytes, found.written_bytes
    record(Result("models", what, inner, *sizes, max(apart.values(), default=0.0), found.graph_breaks))
    assert apart == {}


def check_offload(found: Trial) -> None:
    assert found.offloaded_bytes >= LEAST_OFFLOADED * found.saved_bytes
    assert found.written_bytes > 0.5 * found.offloaded_bytes  # the rest was handed back before it was written
    assert found.read_bytes > 0.5 * found.offloaded_bytes


@functools.cache
def everything_kept(name: str, dropout: float) -> tuple[Training, Trial]:
    """With eager kernels."""
    training = Training(MODELS[name], dropout)
    return training, trial(training, kept({"inner": "aot_eager", "min_bytes": 0}))


@pytest.mark.parametrize(("name", "dropout"), [case(name, dropout) for name in MODELS for dropout in (0.1, 0.0)])
def test_eager_kernels(name: str, dropout: float, tmp_path: Path) -> None:
    training, expected = everything_kept(name, dropout)
    found = trial(training, ours(options(tmp_path, inner="aot_eager")))
    compared(f"{name}, dropout {dropout:g}", "aot_eager", found, expected)
    check_offload(found)


@pytest.mark.parametrize("budget", [0.0, pytest.param("auto", marks=pytest.mark.zoo)])
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "GPT-2" else pytest.mark.zoo) for n in MODELS])
def test_computed_again(name: str, budget: float | str, tmp_path: Path) -> None:
    """On a drive so slow that whatever can be is computed again, or what is cheap with "auto"."""
    training, expected = everything_kept(name, 0.1)
    found = trial(training, ours(options(tmp_path, inner="aot_eager", budget=budget, recompute=True, machine=SLOW)))
    compared(f"{name}, {'recomputed' if budget == 0.0 else 'recomputed under auto'}", "aot_eager", found, expected)
    assert found.saved_bytes < expected.saved_bytes or name not in FAST


@pytest.mark.zoo
@pytest.mark.parametrize("name", MODELS)
def test_every_source(name: str) -> None:
    """Wherever a value comes from; one compilation."""
    training = Training(MODELS[name], 0.1, settled=False)
    prove_bitwise(training, [kept(sources.OPTIONS), ours(sources.OPTIONS)], sources.ALL)


@pytest.mark.slow
@pytest.mark.zoo
@pytest.mark.parametrize("dropout", [0.1, 0.0])
@pytest.mark.parametrize("name", MODELS)
def test_inductor(name: str, dropout: float, tmp_path: Path) -> None:
    training, what = Training(MODELS[name], dropout), f"{name}, dropout {dropout:g}"
    try:
        plain = trial(training, stock("inductor"))
    except Exception as error:
        record(Result("models", what, "inductor", reason=f"plain Inductor: {type(error).__name__}"))
        pytest.skip(f"plain Inductor does not compile it: {type(error).__name__}: {error}")
    expected, found = (trial(training, compile) for compile in (kept(options(tmp_path)), ours(options(tmp_path))))
    assert found.graph_breaks == plain.graph_breaks
    assert near(found.values, plain.values)
    compared(what, "inductor", found, expected)
    check_offload(found)
