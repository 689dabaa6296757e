"""The tests for a GPU, as far as they need none: what is wrong with a test itself is found before a GPU is there."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.bitwise import stock
from tests.gpu import test_gpu_roundtrip as roundtrips
from tests.gpu import test_gpu_training as training

ROOT = Path(__file__).parent.parent
ON_STREAMS = {  # what these see of the device, the CPU has not
    "test_several_streams",
    "test_load_into_memory_whose_last_user_is_queued",
    "test_stored_memory_is_free_afterwards",
    "test_nodes_have_the_device_s_times",
    "test_streams_of_torch",
}
WITHOUT_STREAMS = {
    name: test for name, test in inspect.getmembers(roundtrips, inspect.isfunction) if name.startswith("test_")
}


@pytest.mark.parametrize("engine", ["memory", "posix"])
@pytest.mark.parametrize("name", sorted(WITHOUT_STREAMS.keys() - ON_STREAMS))
def test_on_the_cpu(name: str, engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roundtrips, "DEVICE", "cpu")
    config = json.dumps({"dirs": [str(tmp_path)], "engine": engine, "allow_tmpfs": True})
    test = WITHOUT_STREAMS[name]
    more = inspect.signature(test).parameters.keys() - {"config"}
    for case in [{"dtype": torch.bfloat16, "n": 999}, {"dtype": torch.bool, "n": 70_001}] if more else [{}]:
        assert case.keys() == more
        test(config, **case)


@pytest.mark.slow
@pytest.mark.parametrize("engines", ["", "kvikio-forced"])
def test_every_engine_is_tried_and_the_forced_one_alone(engines: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)} | ({"GPU_ENGINES": engines} if engines else {})
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-m", "gpu", "tests/gpu", "-k", "counts"]
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
    names = [line.split("[")[1].rstrip("]") for line in found.stdout.splitlines() if "test_counts[" in line]
    assert names == ([engines] if engines else ["memory", "posix", "kvikio"])


def test_training_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through Inductor `tests/test_training.py` trains there."""
    monkeypatch.setattr(training, "DEVICE", "cpu")
    monkeypatch.setattr(training, "stock", lambda inner: stock("aot_eager"))
    monkeypatch.setenv("SSD_FX_INNER", "aot_eager")
    config = json.dumps({"dirs": [str(tmp_path)], "engine": "posix"})
    training.test_same_bits_as_in_memory(config)
    training.test_close_to_plain_inductor(config)


@pytest.mark.slow
def test_a_model_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = pytest.importorskip("tests.gpu.test_gpu_models")
    monkeypatch.setattr(models, "DEVICE", "cpu")
    models.test_every_way("GPT-2", tmp_path)
