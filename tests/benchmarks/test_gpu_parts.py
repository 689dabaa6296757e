"""`make gpu` in parts: what they run is there and takes its flags, and none of them stops the others."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import gpu_bandwidth
import gpu_fit
import gpu_parts
import gpu_ways
import pytest
import torch
import turns
from gpu_parts import PARTS
from gpu_steps import summed
from parts import Ended, Part, filled, run

ROOT = Path(__file__).parents[2]
WHERE = {"python": sys.executable, "dir": "/drive", "ram": "/ram", "out": "/out", "cache": "/cache", "workers": "2"}
COMMANDS = [(part, filled(command, WHERE)) for part in PARTS for command in part.commands]


def arguments(script: str) -> list[tuple[str, list[str]]]:
    """(part, arguments) of all commands that run `script`."""
    return [(part.name, words[words.index(script) + 1 :]) for part, words in COMMANDS if script in words]


def test_every_part_has_less_than_five_minutes_and_a_name_of_its_own() -> None:
    assert all(part.limit_s < 300 for part in PARTS)
    assert len({part.name for part in PARTS}) == len(PARTS)
    assert PARTS[-1].name == "kvikio-forced"


def test_what_the_parts_run_is_there() -> None:
    for _, words in COMMANDS:
        assert all((ROOT / word).exists() for word in words if re.fullmatch(r"(tests|benchmarks)/.*", word)), words


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As if there was one, and a directory on its drive."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.chdir(tmp_path)


def here(given: Sequence[str]) -> list[str]:
    return ["drive" if word == "/drive" else word for word in given]


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("name", "given"), arguments("benchmarks/gpu_bandwidth.py"), ids=lambda value: str(value)[:20])
def test_the_benchmark_takes_the_flags_of_its_parts(name: str, given: list[str]) -> None:
    flags = gpu_bandwidth.parsed(here(given))
    assert flags.name == name
    assert flags.results == "/out"


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("name", "given"), arguments("benchmarks/gpu_ways.py"), ids=lambda value: str(value)[:20])
def test_the_ways_are_taken(name: str, given: list[str]) -> None:
    flags = gpu_ways.parsed(here(given))
    assert name in (flags.name, f"ways-{flags.name}")
    assert flags.ways == given[given.index("--ways") + 1 :]
    limit = next(part.limit_s for part in PARTS if part.name == name)
    assert flags.seconds < limit  # what was measured is printed before the part is ended


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("name", "given"), arguments("benchmarks/gpu_fit.py"), ids=lambda value: str(value)[:20])
def test_the_limits_are_taken(name: str, given: list[str]) -> None:
    flags = gpu_fit.parsed(here(given))
    assert name == flags.name
    assert flags.limits == given[given.index("--limits") + 1 :]


def test_a_limit_that_was_passed_is_named() -> None:
    step = {"peak_bytes": 3 << 30, "reserved_bytes": 4 << 30, "time_s": 0.02, "loss": 1.0, "written_bytes": 1 << 20}
    lines = gpu_fit.row("2GiB", [step, step | {"peak_bytes": 1 << 30}], 1)
    assert lines == "| 2GiB | 2 | 3072 | NO, 1024 MiB over | 4096 | 50.0% | 1 | 20.0 |"


def test_a_limit_without_all_of_its_steps_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its process may have run out of memory."""
    step = {"peak_bytes": 1 << 20, "reserved_bytes": 1 << 20, "time_s": 0.02, "loss": 1.0, "written_bytes": 0}
    given = ["--device", "cpu", "--dir", str(tmp_path), "--results", str(tmp_path), "--steps", "2"]
    for made, status in ((2, 0), (1, 1)):
        found = {"2GiB": [step] * made, gpu_fit.PLAIN: [step] * 2}
        monkeypatch.setattr(gpu_fit, "measure", lambda _, found=found: found)
        assert gpu_fit.main(given) == status


def test_results_of_the_parts_have_different_names() -> None:
    scripts = ("gpu_bandwidth", "gpu_ways", "gpu_fit")
    given = [words for script in scripts for words in arguments(f"benchmarks/{script}.py")]
    names = [words[words.index("--name") + 1] for _, words in given]
    assert len(set(names)) == len(names)


def test_the_forced_engine_has_processes_of_its_own() -> None:
    """cuFile is configured once in a process."""
    for part, words in COMMANDS:
        named = [words[i + 1] for i, word in enumerate(words) if word == "--engines"]
        engines = set(",".join([part.environment.get("GPU_ENGINES", ""), *named]).split(","))
        assert not {"kvikio", "kvikio-forced"} <= engines


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "--dir is needed"),
        (["--dir", "d", "--engines", "posix,kvikio-forced"], "kvikio-forced needs a process of its own"),
    ],
    ids=["no directory", "not alone"],
)
def test_flags_that_would_mislead_are_refused(
    given: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        gpu_bandwidth.parsed(given)
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    "way",
    [
        *("", "memory", "memory:", "tape:0", "memory:lots", "memory:0:x", "memory:0,inflght=1GiB", "memory:0,inflight"),
        *("recompute:half", "recompute:2", "blocks:checkpoint", "blocks:tape:0"),
    ],
)
def test_a_way_that_there_is_not(way: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=f"'{way}' is no way: .*; right would be .*ENGINE:BUDGET"):
        gpu_ways.checked(way)


@pytest.mark.parametrize("ways", [["memory:0", "memory:0"], ["kvikio:0", "blocks:kvikio-forced:0"]])
def test_ways_that_do_not_go_together(ways: list[str]) -> None:
    with pytest.raises(SystemExit):
        gpu_ways.parsed(["--dir", "d", "--ways", *ways])


def test_a_way_has_options() -> None:
    found = gpu_ways.options_of(gpu_ways.checked("posix:auto:4GiB,inflight=1GiB,min_bytes=2MiB"))
    first = {"engine": "posix", "budget": "auto", "host_budget": "4GiB"}
    assert found == first | {"inflight": "1GiB", "min_bytes": "2MiB"}


def test_who_measures_does_it_alone(tmp_path: Path) -> None:
    """The second compiles, or measures, so the first waits, and has no turn after a while."""
    first, second = (turns.Turn(str(tmp_path / "turns")) for _ in range(2))
    assert first.compile(0.0)
    assert second.compile(0.0)
    assert not first.measure(0.2)
    assert second.measure(0.0)
    assert not first.measure(0.2)
    assert not first.compile(0.2)
    del second
    assert first.measure(0.0)


def test_every_share_is_compiled_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo runs the code of one backend for an equal one, if the model is the same."""
    shares = []

    def compiled(gm: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Callable[..., object]:
        shares.append(torch._functorch.config.activation_memory_budget)
        return gm.forward

    monkeypatch.setattr(gpu_ways, "compile_fx", compiled)
    model = torch.nn.Linear(2, 2)
    for share in (0.3, 0.7, 0.3):
        torch.compile(model, backend=gpu_ways._recomputing(share))(torch.ones(2))
    assert shares == [0.3, 0.7, 0.3]


def test_a_way_without_memory_is_not_in_the_table() -> None:
    step = {"time_s": 0.02, "graph_s": 0.01, "stall_s": 0.0, "peak_bytes": 4 << 20}
    step |= {f"{what}_bytes": 1 << 20 for what in ("saved", "written", "read")}
    less = {"steps": [step | {"time_s": 0.03, "peak_bytes": 1 << 20}], "ended": ""}
    less["predicted"] = {"floor_bytes": 1 << 19, "step_s": 0.02, "peak_bytes": 1 << 20}
    ways = {"plain": {"steps": [step], "ended": ""}, "memory:0": less, "memory:1.0": {"steps": [], "ended": "no room"}}
    said = gpu_ways.table({"system": {"device": "a GPU"}, "date": "today", "ways": ways}).splitlines()
    assert "- memory:1.0: no steps: no room" in said
    assert said[-1].startswith(
        "| memory:0 | 30.0 | 1.500 (1.500 to 1.500) | 1 | 75.0% | 86% | 1.0 | 1.0 | 1.0 | 0.0 | 10.0 |"
    )
    assert "plain" not in gpu_ways.table({"system": {"device": "a GPU"}, "date": "today"})


def python(code: str) -> str:
    return f"{{python}} -c {shlex.quote(code)}"


FAKES = (
    Part("first", "fails", 60, (python("import sys; print('one'); sys.exit(3)"), python("print('two')"))),
    Part("absent", "is not there", 60, ("there-is-no-such-program-here",)),
    Part("needy", "needs it", 60, (python("print('never')"),), needs="there-is-no-such-program-here"),
    Part("slow", "never ends", 1, (python("import time; print('three'); time.sleep(60)"), python("print('never')"))),
    Part("last", "works", 60, (python("import os; print('four', os.environ['GPU'])"),), environment={"GPU": "yes"}),
)


def test_a_part_that_fails_stops_no_other(tmp_path: Path) -> None:
    started = time.monotonic()
    ended = list(run(FAKES, WHERE, tmp_path))
    assert time.monotonic() - started < 30
    results = {each.name: each.result for each in ended}
    assert list(results) == ["first", "absent", "needy", "slow", "last"]
    assert re.fullmatch(r"python\S* -c import sys.*: exit status 3", results["first"])
    assert "No such file" in results["absent"]
    assert results["needy"] == "skipped: there is no there-is-no-such-program-here"
    assert results["slow"].endswith("took longer than the part may")
    assert results["last"] == "ok"
    assert [each.failed for each in ended] == [True, True, False, True, False]
    logs = {name: (tmp_path / f"{name}.txt").read_text().splitlines() for name in results}
    said = {name: [line for line in lines if not line.startswith("$")] for name, lines in logs.items()}
    assert said == {"first": ["one", "two"], "absent": [], "needy": [], "slow": ["three"], "last": ["four yes"]}


def test_what_is_not_timed_runs_at_once(tmp_path: Path) -> None:
    """Each waits for the file of the other. What runs alone comes in its turn."""

    def meets(mine: str, other: str) -> str:
        files = f"mine, other = pathlib.Path({str(tmp_path / mine)!r}), pathlib.Path({str(tmp_path / other)!r})"
        return python(f"import pathlib, time; {files}; mine.touch()\nwhile not other.exists(): time.sleep(0.01)")

    timed = Part("timed", "", 20, (python(f"import os; os.stat({str(tmp_path / 'a')!r})"),))
    parts = (*(Part(x, "", 20, (meets(x, y),), alone=False) for x, y in ("ab", "ba")), timed)
    ended = list(run(parts, WHERE, tmp_path))
    assert [each.result for each in ended] == ["ok"] * 3
    assert ended[-1].name == "timed"


def test_ctrl_c_ends_what_runs_at_once(tmp_path: Path) -> None:
    sleep = python("import time; time.sleep(50)")
    parts = [Part(name, "", 60, (sleep, sleep), alone=False) for name in "ab"]
    quick = Part("c", "", 60, (python("pass"),), alone=False)
    started, running = time.monotonic(), run([*parts, quick], WHERE, tmp_path)
    assert next(running).name == "c"
    with pytest.raises(KeyboardInterrupt):
        running.throw(KeyboardInterrupt)
    assert time.monotonic() - started < 20, "nor does a command that stands behind it begin"


def test_a_part_that_is_too_slow_leaves_no_process(tmp_path: Path) -> None:
    """What it had started is ended with it."""
    child = f"import time, os; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    starts = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    (ended,) = run([Part("slow", "", 2, (python(starts),))], WHERE, tmp_path)
    assert ended.failed
    pid = int((tmp_path / "pid").read_text())
    for _ in range(100):
        status = Path(f"/proc/{pid}/stat")
        if not status.exists() or status.read_text().split()[2] == "Z":
            return
        time.sleep(0.05)
    os.kill(pid, 9)
    pytest.fail("its child lives on")


def test_a_table_and_a_file_that_later_parts_add_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_parts, "PARTS", FAKES)
    places = ["--dir", str(tmp_path / "drive"), "--out", str(tmp_path / "out")]
    assert gpu_parts.main([*places, "last"]) == 0
    assert gpu_parts.main([*places, "needy", "first"]) == 1
    found = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert {name: each["result"].split()[0] for name, each in found.items()} == {
        "last": "ok",
        "first": Path(sys.executable).name,
        "needy": "skipped:",
    }
    (tmp_path / "out" / "last.txt").unlink()
    assert gpu_parts.main([*places, "--resume", "last", "first"]) == 1, "only what failed runs again"
    assert not (tmp_path / "out" / "last.txt").exists()
    assert {path.name for path in (tmp_path / "out").iterdir()} == {*("first.txt", "needy.txt", "summary.json")}
    assert gpu_parts.table([Ended("a", "ok", 3.2)]).splitlines()[-1] == "a                    3  ok"


def test_a_dry_run_runs_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert gpu_parts.main(["--dry-run", "--dir", str(tmp_path / "drive"), "ways", "info"]) == 0
    out = capsys.readouterr().out
    ways = [f"ways-{name}" for name in ("wide", "middle", "narrow", "gpt", "drive")]
    assert re.findall(r"^(\S+), at most", out, re.MULTILINE) == ["info", *ways]
    assert out.endswith("in all at most 350 s\n")
    assert {part.name for part in gpu_parts.chosen(["tests"])} == {
        *("roundtrips", "accelerator", "capture", "sanitizer", "training", "ranks", "models")
    }
    assert [part.name for part in gpu_parts.chosen(["long"])] == ["long-64k", "long-16k", "long-tier"]
    assert [part.limit_s for part in gpu_parts.chosen(["pareto"])] == [290] * 3, "at once"
    assert all(part.alone for part in gpu_parts.chosen(["fit"])), "three at once took longer than two minutes"
    assert not (tmp_path / "drive").exists()
    with pytest.raises(SystemExit, match="no part is called nothing; there are info, roundtrips,"):
        gpu_parts.main(["--dry-run", "nothing"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_nothing_is_run(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no GPU here"):
        gpu_parts.main(["--dir", str(tmp_path / "drive"), "--out", str(tmp_path / "out")])
    assert list(tmp_path.iterdir()) == []


def test_make_passes_the_part_on() -> None:
    given = ["gpu-ways-gpt", "GPU_DIR=/drive", "GPU_RESULTS=/out", "GPU_FLAGS=--dry-run"]
    command = ["make", "-n", "--no-print-directory", *given]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.rstrip().endswith("benchmarks/gpu_parts.py --dir /drive --out /out --dry-run ways-gpt")


def test_kernels_are_told_from_copies() -> None:
    events = [("triton_a", 500.0), ("Memcpy DtoH", 250.0), ("triton_b", 2000.0), ("triton_a", 500.0)]
    found = summed(events)
    assert found == {"count": 3, "ms": 3.0, "copies_ms": 0.25, "largest": {"triton_b": 2.0, "triton_a": 1.0}}
    ways = {"plain": {"steps": [], "ended": ""}, "memory:0": {"steps": [], "ended": "", "kernels": found}}
    assert "| memory:0 | 3 | 3.00 | 0.25 |" in gpu_ways.table({"system": {"device": ""}, "date": "", "ways": ways})


def test_half_a_result_has_half_a_table() -> None:
    result = {"system": {"device": "a GPU"}, "date": "today", "serving": {}, "missing": {"kvikio": "no"}}
    said = gpu_bandwidth.table(result | {"bandwidth": []})
    assert said.splitlines()[-2:] == ["- device: a GPU", "- engine kvikio: not here: no"]
