import pytest
import torch

from tests.runtime.harness import config_json


@pytest.fixture
def config(tmp_path):
    """The posix engine in a directory of its own."""
    return config_json(tmp_path)


@pytest.fixture(params=["posix", "memory"])
def any_config(request, tmp_path):
    return config_json(tmp_path, request.param)


@pytest.fixture
def no_device(monkeypatch):
    """As on a machine without a GPU, where `host_budget` adds to what may rest in memory."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
