"""`ssd-fx explain script.py`: the report of a training script, before it trains.

The script runs up to its first backward, as in `ssd-fx fit`. Every graph of that step is planned under the script's own
options, or another budget. Nothing is compiled.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import fx

from ssd_fx import traced
from ssd_fx.estimate import Budget
from ssd_fx.passes import pipeline
from ssd_fx.passes.joint.recompute import Joint
from ssd_fx.passes.options import PlanOptions
from ssd_fx.refusal import refusing
from ssd_fx.report.command import add_output, tell
from ssd_fx.report.describe import describe
from ssd_fx.report.model import GraphReport
from ssd_fx.report.report import Report, made
from ssd_fx.script import add_script, until_trained
from ssd_fx.sizes import parse_budget
from ssd_fx.survey import Look, TrainingStep

USAGE = "ssd-fx explain script.py [--budget 0.5] [-o report.html] [--json] [-- the script's own arguments]"
_EXAMPLES = """examples:
  ssd-fx explain train.py -o report.html
  ssd-fx explain train.py --budget 0.5 -- --epochs 1

exit status: 0 fine; 1 the script cannot be planned, or the page cannot be written; 2 wrong words.
"""


def add(commands: Any) -> None:
    """Add the command to `commands`, argparse's sub-parsers."""
    parser = commands.add_parser(
        "explain",
        usage=USAGE,
        help="the report of a training script, before it trains",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_script(parser)
    parser.add_argument("--budget", help="another budget than the script's: a share, a size or auto")
    add_output(parser)
    parser.set_defaults(run=run)


def run(flags: argparse.Namespace) -> int:
    """Run the command, and return its exit status. 1: the script or its model cannot be planned. 2: a wrong flag."""
    with refusing(2):
        budget = None if flags.budget is None else parse_budget("budget", flags.budget)
    return tell(lambda: _report(until_trained(flags.script, flags.behind, partial(_look, budget))), flags)


def _report(step: TrainingStep) -> Report:
    if step.note:
        print(f"ssd-fx: {step.note}", file=sys.stderr)
    return made(step.runs, [found.graph for found in step.runs])


def _look(budget: Budget | None, gm: fx.GraphModule) -> Look[GraphReport]:
    """The function that looks at the joint graph of a Dynamo graph. It has the user's names of the inputs."""
    return partial(_described, budget, traced.arguments(gm), traced.function())


def _described(
    budget: Budget | None, arguments: Sequence[str], function: str, joint: Joint, options: PlanOptions
) -> GraphReport:
    """What `describe` says of the plan under `budget`, or under the options' budget if that is None.

    `arguments` and `function` as in `describe`.
    """
    asked = options if budget is None else replace(options, budget=budget)
    partition, plan = pipeline.decide_joint(joint, asked)
    found = describe(partition, plan, asked, arguments, function)
    return found if budget is None else replace(found, memory="")
