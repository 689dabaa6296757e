"""`check_options` says before training what the backend would say when the model first runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import ssd_fx

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
NO_TMPFS = pytest.mark.skipif(not os.path.ismount("/dev/shm"), reason="no tmpfs at /dev/shm")


def complaint_of_the_backend(options: dict[str, object]) -> Exception:
    torch._dynamo.reset()
    with pytest.raises((ValueError, OSError)) as caught:
        torch.compile(lambda t: t.sin().sum(), backend="ssd_fx", options=options)(torch.ones(4, requires_grad=True))
    return caught.value


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"bugdet": 0}, "has no option 'bugdet'; did you mean 'budget'"),
        ({"budget": "lots"}, "budget='lots' is not a budget"),
        ({"dirs": ["/nowhere/at/all"]}, "does not exist; create it on an NVMe drive: '/nowhere/at/all'"),
        ({"dirs": [__file__]}, "need a directory"),
        pytest.param({"dirs": ["/dev/shm"]}, "allow_tmpfs", marks=NO_TMPFS),
        ({"dirs": ["/proc"]}, "no file can be made here .*name a directory on a drive: '/proc'"),
        ({"machine": {"flops": "many"}}, "flops='many' is no rate"),
        ({"dump": "/proc/nothing"}, "No such file or directory: '/proc/nothing'"),
        pytest.param({"engine": "kvikio"}, "torch sees no CUDA device", marks=NO_GPU),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_the_same_complaint(options: dict[str, object], says: str) -> None:
    later = complaint_of_the_backend(options)
    with pytest.raises((ValueError, OSError), match=says) as caught:
        ssd_fx.check_options(options)
    assert isinstance(later, type(caught.value))
    assert str(later).startswith(str(caught.value))  # Dynamo adds how to see its own stack


def test_a_mode_that_is_none_of_ours() -> None:
    with pytest.raises(ValueError, match="mode='max-autotune' is Inductor's; inner='aot_eager' takes none"):
        ssd_fx.check_options({"inner": "aot_eager"}, mode="max-autotune")


def test_a_mode_that_nobody_knows(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"mode='nonsense' is none of Inductor's; right would be .*'reduce-overhead'"):
        ssd_fx.check_options({"dirs": [tmp_path], "allow_tmpfs": True}, mode="nonsense")


def test_nothing_is_made(tmp_path: Path) -> None:
    """The dump may be meant for another run. A model that compiles makes it."""
    options = {"dirs": [tmp_path], "allow_tmpfs": True, "inner": "aot_eager", "dump": tmp_path / "new" / "dump"}
    ssd_fx.check_options(options)
    assert [*tmp_path.iterdir()] == []
    torch.compile(lambda x: x.sin().sum(), backend=ssd_fx.backend, options=options)(torch.ones(4, requires_grad=True))
    assert (tmp_path / "new" / "dump").is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="file/dump"):
        ssd_fx.check_options(options | {"dump": tmp_path / "file" / "dump"})


def test_good_options_come_back_with_those_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSD_FX_DIRS", str(tmp_path))
    found = ssd_fx.check_options({"budget": "25%"})
    assert (found.dirs, found.budget) == ((str(tmp_path),), 0.25)
    monkeypatch.setenv("SSD_FX_DIRS", str(tmp_path / "gone"))
    with pytest.raises(FileNotFoundError, match="does not exist; create it"):
        ssd_fx.check_options()
