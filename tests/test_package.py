"""What is installed: every module, the built pool, nothing under a bare name; and the digest that caches know it by."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from ssd_fx.source import digest, source_digest

ROOT = Path(__file__).resolve().parent.parent
PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
TRAIN = """
import torch, ssd_fx, sys
from ssd_fx.runtime.native.loader import library
assert ssd_fx.__file__.startswith(sys.argv[1]), ssd_fx.__file__
library()
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8))
options = {"dirs": [sys.argv[2]], "budget": 0, "min_bytes": 0, "inner": "aot_eager", "allow_tmpfs": True}
torch.compile(model, backend="ssd_fx", options=options)(torch.randn(4, 8)).sum().backward()
assert ssd_fx.stats().stores > 0
print("trained", ssd_fx.source.source_digest())
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Python files at three depths."""
    for name in ("top/a.py", "top/room/b.py", "top/room/inner/c.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"# {name}\n")
    return tmp_path / "top"


@pytest.mark.parametrize("name", ["a.py", "room/b.py", "room/inner/c.py"])
def test_the_digest_sees_a_change_at_any_depth(tree: Path, name: str) -> None:
    before = digest([tree])
    (tree / name).write_text("changed = True\n")
    assert digest([tree]) != before


def test_the_digest_sees_a_file_that_moved_and_takes_each_once(tree: Path) -> None:
    before = digest([tree])
    assert digest([tree, tree / "room"]) == before
    (tree / "a.py").rename(tree / "room" / "a.py")
    assert digest([tree]) != before


def test_the_digest_is_of_every_module_of_the_checkout() -> None:
    folders = [ROOT / name for name in ("ssd_fx", "passes", "runtime")]
    assert source_digest() == digest(folders)


def test_a_wheel_has_every_package_of_the_checkout() -> None:
    """An editable install works without them, so no other test of this suite sees that one is forgotten."""
    listed = re.search(r"^packages = \[(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.DOTALL | re.MULTILINE)
    assert listed
    folders = {str(Path(module).parent).replace("/", ".") for module in modules()}
    assert set(re.findall(r'"(.*?)"', listed[1])) == folders


def modules() -> set[str]:
    found = {file for name in ("ssd_fx", "passes", "runtime") for file in (ROOT / name).rglob("*.py")}
    paths = {file.resolve().relative_to(ROOT) for file in found}
    return {str(p) if p.parts[0] == "ssd_fx" else f"ssd_fx/{p}" for p in paths}


def checkout(path: Path) -> Path:
    """A copy of this one. setuptools builds in the tree, and takes what an earlier build has left there."""
    kept_out = shutil.ignore_patterns(".*", "__pycache__", "build", "*.egg-info", "demo-out")
    return Path(shutil.copytree(ROOT, path, symlinks=True, ignore=kept_out))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_an_install_has_every_module_and_trains(tmp_path: Path, kind: str) -> None:
    """Neither has anything named `passes` or `runtime` at the top; what is installed is what runs."""
    source = checkout(tmp_path / "checkout")
    if kind == "sdist":
        make = "import setuptools.build_meta as b, sys; print(b.build_sdist(sys.argv[1]))"
        subprocess.run([sys.executable, "-c", make, str(tmp_path)], cwd=source, check=True, capture_output=True)
        (archive,) = tmp_path.glob("*.tar.gz")
        with tarfile.open(archive) as opened:
            files = {name.partition("/")[2] for name in opened.getnames()}
            assert files >= {"docs/options.md", "examples/train_gpt.py", "tests/passes/toys.py", "CHANGELOG.md"}
            opened.extractall(tmp_path / "unpacked")
        (source,) = (tmp_path / "unpacked").iterdir()
    wheels, site = tmp_path / "wheels", tmp_path / "site"
    build = [*PIP, "wheel", "--no-deps", "--no-build-isolation", "-w", str(wheels), str(source)]
    subprocess.run(build, check=True)
    (wheel,) = wheels.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    (metadata,) = (name for name in names if name.endswith("METADATA"))
    described = zipfile.ZipFile(wheel).read(metadata).decode()
    assert "(`docs/using.md`)" in described
    assert re.findall(r"\]\((?!https?://)[^)]*\)", described) == [], "links that lead nowhere on an index"
    assert {name for name in names if name.endswith(".py")} == modules()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"ssd_fx"}
    assert any("_iopool" in name for name in names)
    subprocess.run([*PIP, "install", "--no-deps", "--target", str(site), str(wheel)], check=True)
    (tmp_path / "drive").mkdir()
    command = [sys.executable, "-c", TRAIN, str(site), str(tmp_path / "drive")]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(site)}, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode().startswith("trained")


@pytest.mark.slow
def test_a_script_beside_the_clone_imports_an_editable_install(tmp_path: Path) -> None:
    """`git clone .../ssd_fx; pip install -e ssd_fx; python train.py`: the folder looks like a namespace package."""
    clone, site = checkout(tmp_path / "ssd_fx"), tmp_path / "site"
    make = "import setuptools.build_meta as b, sys; print(b.build_editable(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", make, str(tmp_path)], cwd=clone, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    subprocess.run([*PIP, "install", "--no-deps", "--target", str(site), str(wheel)], check=True)
    script = "import site, sys; site.addsitedir(sys.argv[1]); import importlib.util as u; print(u.find_spec('ssd_fx'))"
    (tmp_path / "train.py").write_text(script)
    found = subprocess.run(  # without the packages of this environment, which has an editable install too
        [sys.executable, "-S", "train.py", str(site)], cwd=tmp_path, check=True, capture_output=True, text=True
    )
    assert str(clone / "ssd_fx" / "__init__.py") in found.stdout
    assert any((clone / "runtime" / "native").glob("_iopool*.so"))
