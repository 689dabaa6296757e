"""The command `ssd-fx`.

ssd-fx doctor /mnt/nvme        versions, compiler, drives, rates, wear and limits, each with what to do
ssd-fx calibrate /mnt/nvme     measure the rates that plans are made for, and keep them in the cache directory
ssd-fx fit script.py           what a step of a training script needs, under several budgets, without training
ssd-fx explain script.py       the report of a training script, before it trains
ssd-fx report trace.json       the report of a run, from the trace that it wrote
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

import ssd_fx
from ssd_fx import explain_script, fit, script
from ssd_fx.command import calibrating, doctor
from ssd_fx.config import Config
from ssd_fx.refusal import Refused, refusing
from ssd_fx.report import command as report

# Each has add(commands), which names its run(flags).
COMMANDS = (doctor, calibrating, fit, explain_script, report)
_NO_OPTIONS = ("report",)  # commands that look at no option of the environment


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit status.

    0: fine. 1: something is missing, the cores are busy, or the output cannot be written. 2: a script does not fit the
    memory, or a wrong word on the command line or in the environment. As a shell has it, 130: Ctrl-C, and 141: the
    reader of the output has gone.
    """
    if sys.stdout is None:
        print("ssd-fx: the output cannot be written: it is closed", file=sys.stderr)
        return 1
    try:
        try:
            return _run(argv)
        finally:
            sys.stdout.flush()
    except Refused as refused:
        print(f"ssd-fx: {refused}", file=sys.stderr)
        return refused.status
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except OSError as error:
        if error.filename is not None:  # an error of the command itself
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at exit
        if isinstance(error, BrokenPipeError):
            return 128 + signal.SIGPIPE
        print(f"ssd-fx: the output cannot be written: {error.strerror}", file=sys.stderr)
        return 1


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, without the usage, which is long."""
        self.exit(2, f"ssd-fx: {message}; {self.prog} --help has all words\n")


def parser() -> argparse.ArgumentParser:
    """The parser of all words of the command line."""
    made = _Parser(prog="ssd-fx", description="Activations on NVMe: what this machine offers, and what they need.")
    made.add_argument("--version", action="version", version=f"ssd_fx {ssd_fx.__version__}")
    _add_completion(made)
    commands = made.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for each in COMMANDS:
        each.add(commands)
    return made


def _run(argv: Sequence[str] | None) -> int:
    own, behind = script.split(sys.argv[1:] if argv is None else argv)
    flags = parser().parse_args(own)
    flags.behind = behind
    if flags.command not in _NO_OPTIONS:
        with refusing(2):
            Config.make()
    return int(flags.run(flags))


def _add_completion(made: argparse.ArgumentParser) -> None:
    """Add `--print-completion`, where the library that writes completions is installed."""
    if importlib.util.find_spec("shtab") is None:
        return
    import shtab

    shtab.add_argument_to(made, "--print-completion", help="print what a shell completes: bash, zsh or tcsh")
