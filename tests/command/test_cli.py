"""The words of the command line, exit statuses, and what a wrong environment says."""

from __future__ import annotations

import argparse
import errno
import json
import os
import sys
from pathlib import Path
from typing import NoReturn

import pytest

import ssd_fx
from ssd_fx import cli
from ssd_fx.calibration.cache import Entry
from ssd_fx.options import Options
from ssd_fx.runtime.engines import gds, preflight
from tests.runtime.harness import directories

NAMES = ("doctor", "calibrate", "fit", "explain", "report")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"ssd_fx {ssd_fx.__version__}\n"


def commands() -> dict[str, argparse.ArgumentParser]:
    (found,) = (a for a in cli.parser()._actions if isinstance(a, argparse._SubParsersAction))
    return dict(found.choices)


@pytest.mark.parametrize("name", NAMES)
def test_every_command_answers_in_json_as_well(name: str) -> None:
    assert "--json" in commands()[name].format_help()


@pytest.mark.parametrize("name", NAMES)
def test_help_has_examples_and_exit_statuses(name: str) -> None:
    text = commands()[name].format_help()
    assert f"examples:\n  ssd-fx {name} " in text
    assert "\nexit status: 0 " in text


@pytest.mark.parametrize("command", [["calibrate", "."], ["doctor"]])
def test_a_wrong_environment(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSD_FX_BUDGET", "abc")
    assert cli.main(command) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("ssd-fx: SSD_FX_BUDGET in the environment: option budget='abc' is not a budget; right would")
    assert err.count("\n") == 1


@pytest.mark.parametrize("command", [["doctor"], ["doctor", "--json"]])
def test_nobody_reads_what_is_printed(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ssd-fx doctor | head -1`; a command may print a line at a time or all at once."""
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w", buffering=1) as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert cli.main(command) == 141
        print("what Python flushes at exit", flush=True)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("command", [["doctor", "--json"], ["--version"]])
@pytest.mark.parametrize("buffering", [1, -1])
def test_a_full_disk_for_the_output_is_one_line(
    buffering: int, command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ssd-fx doctor --json > /dev/full` wrote a traceback, and another one at exit."""
    with open("/dev/full", "w", buffering=buffering) as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert cli.main(command) == 1
        print("what Python flushes at exit", flush=True)
    assert capsys.readouterr().err == "ssd-fx: the output cannot be written: No space left on device\n"


def test_a_closed_output_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """`ssd-fx doctor >&-`: Python has no sys.stdout then."""
    monkeypatch.setattr(sys, "stdout", None)
    assert cli.main(["doctor"]) == 1
    assert capsys.readouterr().err == "ssd-fx: the output cannot be written: it is closed\n"


def test_an_error_of_the_command_itself_is_not_taken_for_one_of_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(directories: object) -> NoReturn:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "/sys/missing")

    monkeypatch.setattr(cli.doctor.software, "findings", fails)
    with pytest.raises(FileNotFoundError):
        cli.main(["doctor"])


def test_ctrl_c_is_a_status_without_a_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(directories: object) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.doctor.software, "findings", interrupted)
    assert cli.main(["doctor"]) == 130
    assert capsys.readouterr() == ("", "")


def test_a_report_asks_for_no_options(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace is read in any environment, such as one that an older version had."""
    monkeypatch.setenv("SSD_FX_BUDGET", "abc")
    assert cli.main(["report", "missing.json"]) == 1
    assert capsys.readouterr().err == "ssd-fx: missing.json: No such file or directory\n"


def test_rates_in_json(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli.calibrating.calibrate, "_learn", lambda config, device, *_: known(config, device))
    monkeypatch.setattr(cli.calibrating.calibrate, "_known", {})
    assert cli.main(["calibrate", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["rates"]["flops"], found["unmeasured"]) == (2e11, [])


def test_directories_that_are_striped_are_measured_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stripe has rates of its own, and plans look for those of all its drives."""
    asked: list[Options] = []
    calibrate = cli.calibrating.calibrate
    monkeypatch.setattr(calibrate, "_learn", lambda config, device, *_: (asked.append(config), known(config, device)))
    monkeypatch.setattr(calibrate, "_known", {})
    both = directories(tmp_path, 2)
    assert cli.main(["calibrate", *both]) == 0
    assert [list(config.dirs) for config in asked] == [both]


def known(config: object, device: object) -> None:
    calibrate = cli.calibrating.calibrate
    keys = calibrate._keys(config, device)  # type: ignore[arg-type]
    rates = {"compute": {"flops": 2e11}, "disk": {"write_bw": 1.5e9}}
    calibrate._known.update({key: Entry(rates[section]) for section, key in keys.items()})


def test_an_engine_that_the_machine_lacks_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`SSD_FX_ENGINE=kvikio ssd-fx calibrate` on a machine without GPUDirect Storage."""

    def lacks(*, forced: bool) -> NoReturn:
        raise RuntimeError("no GPUDirect Storage here")

    monkeypatch.setenv("SSD_FX_ENGINE", "kvikio")
    monkeypatch.setattr(gds, "check_machine", lacks)
    assert cli.main(["calibrate", str(tmp_path)]) == 1
    assert capsys.readouterr() == ("", "ssd-fx: no GPUDirect Storage here\n")


def test_calibrating_in_memory_is_refused_unless_it_is_allowed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli.calibrating.calibrate, "_learn", lambda config, device, *_: known(config, device))
    monkeypatch.setattr(cli.calibrating.calibrate, "_known", {})
    monkeypatch.setattr(preflight, "file_system_type", lambda _: 0x01021994)
    assert cli.main(["calibrate", str(tmp_path)]) == 1
    assert capsys.readouterr().err.endswith("or set allow_tmpfs for a test\n")
    monkeypatch.setenv("SSD_FX_ALLOW_TMPFS", "1")
    assert cli.main(["calibrate", str(tmp_path)]) == 0


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("doctor ~/x", "directory"),
        ("calibrate ~/x", "directory"),
        ("fit ~/x", "script"),
        ("explain ~/x", "script"),
        ("report ~/x", "trace"),
        ("report trace -o ~/x", "output"),
    ],
)
def test_a_tilde_in_quotes_is_the_home_directory(words: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shell expands none in quotes, which a path with a space needs, and none behind `--output=`."""
    monkeypatch.setenv("HOME", "/home/me")
    found = getattr(cli.parser().parse_args(words.split()), name)
    assert found in ("/home/me/x", ["/home/me/x"])


def test_what_a_shell_completes(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab", reason="needs pip install -e '.[completion]'")
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--print-completion", "bash"])
    assert "doctor" in capsys.readouterr().out
