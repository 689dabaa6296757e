"""Other people's models train with everything saved on disk, and compute what they compute with everything kept.

    make zoo                          all of them; a few are in the default suite
    pytest tests/zoo -k "Llama"       one

`aot_eager`: bitwise the same partition's kernels with everything kept. Inductor: bitwise the same generated code on the
engine "memory", which moves no bytes; and near plain Inductor, whose kernels are cut elsewhere.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="the zoo needs pip install -e '.[zoo]'")

import ssd_fx
from tests import sources
from tests.compatibility import Result, record
from tests.passes.recomputing import SLOW
from tests.zoo.models import MODELS
from tests.zoo.trial import Compiled, Trial, deterministic, train

FAST = ("GPT-2", "BERT")  # with dropout and eager kernels: twenty seconds each
LEAST_OFFLOADED = 0.9  # of the saved bytes: what cannot leave is small


def case(name: str, dropout: float) -> Any:
    return pytest.param(name, dropout, marks=() if name in FAST and dropout else pytest.mark.zoo)


def options(directory: Path, **more: Any) -> dict[str, Any]:
    return {"dirs": [str(directory)], "min_bytes": 0, "budget": 0.0} | more


def compared(name: str, inner: str, dropout: float, ours: Trial, reference: Trial) -> None:
    difference = ours.difference(reference)
    sizes = ours.saved_bytes, ours.written_bytes
    record(Result("models", f"{name}, dropout {dropout:g}", inner, *sizes, difference, ours.graph_breaks))
    assert ours.apart(reference) == {}
    assert ours.offloaded_bytes >= LEAST_OFFLOADED * ours.saved_bytes
    assert ours.written_bytes > 0.5 * ours.offloaded_bytes  # the rest was handed back before it was written
    assert ours.read_bytes > 0.5 * ours.offloaded_bytes


@pytest.mark.parametrize(("name", "dropout"), [case(name, dropout) for name in MODELS for dropout in (0.1, 0.0)])
def test_eager_kernels(name: str, dropout: float, tmp_path: Path) -> None:
    with deterministic():
        kept = train(MODELS[name], dropout, options(tmp_path, inner="aot_eager", budget=1.0, recompute=False))
        ours = train(MODELS[name], dropout, options(tmp_path, inner="aot_eager"))
    compared(name, "aot_eager", dropout, ours, kept)


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "GPT-2" else pytest.mark.zoo) for n in MODELS])
@pytest.mark.parametrize("budget", [0.0, "auto"])
def test_computed_again(name: str, budget: float | str, tmp_path: Path) -> None:
    """On a drive so slow that whatever can be is computed again, or what is cheap with "auto"."""
    more = {"inner": "aot_eager", "budget": budget, "recompute": True, "machine": SLOW}
    with deterministic():
        kept = train(MODELS[name], 0.1, options(tmp_path, inner="aot_eager", budget=1.0, recompute=False))
        ours = train(MODELS[name], 0.1, options(tmp_path, **more))
    difference = ours.difference(kept)
    sizes = ours.saved_bytes, ours.written_bytes
    what = "recomputed" if budget == 0.0 else "recomputed under auto"
    record(Result("models", f"{name}, {what}", "aot_eager", *sizes, difference, ours.graph_breaks))
    assert ours.apart(kept) == {}
    assert ours.saved_bytes < kept.saved_bytes or name not in FAST


@pytest.mark.zoo
@pytest.mark.parametrize("name", MODELS)
def test_every_source(name: str) -> None:
    """Wherever a value comes from; one compilation."""
    with deterministic():
        kept = train(MODELS[name], 0.1, sources.OPTIONS | {"budget": 1.0})
        compiled = Compiled(MODELS[name], 0.1, sources.OPTIONS)
        for source in sources.ALL:
            with source.forced():
                ours = compiled.train()
                source.check(ssd_fx.stats())
            assert ours.apart(kept) == {}, source.name


@pytest.mark.slow
@pytest.mark.zoo
@pytest.mark.parametrize("dropout", [0.1, 0.0])
@pytest.mark.parametrize("name", MODELS)
def test_inductor(name: str, dropout: float, tmp_path: Path) -> None:
    with deterministic():
        try:
            plain = train(MODELS[name], dropout, None)
        except Exception as error:
            reason = f"plain Inductor: {type(error).__name__}"
            record(Result("models", f"{name}, dropout {dropout:g}", "inductor", reason=reason))
            pytest.skip(f"plain Inductor does not compile it: {type(error).__name__}: {error}")
        memory = train(MODELS[name], dropout, options(tmp_path, engine="memory"))
        ours = train(MODELS[name], dropout, options(tmp_path))
    assert ours.graph_breaks == plain.graph_breaks
    assert ours.close_to(plain)
    compared(name, "inductor", dropout, ours, memory)
