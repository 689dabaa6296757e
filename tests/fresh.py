"""Fresh interpreters for tests: forks of one that has imported torch, and nothing of ours.

To import torch, and what our package imports beside it, takes four seconds; a fork takes some milliseconds. What an
interpreter looks at when it starts, such as LD_PRELOAD, needs one that is `started`.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
IMPORTS = ("torch", "torch._dynamo.backends.common", "torch._inductor.compile_fx", "networkx", "functorch.compile")
HUNG = "hung"


@dataclass(frozen=True)
class Done:
    """How an interpreter ended; `returncode` is negative for a signal."""

    stdout: str
    stderr: str
    returncode: int


def run(code: str, *arguments: object, timeout_s: float = 120, **environment: str) -> Done:
    """What a fresh interpreter makes of `code`, with `arguments` in `sys.argv`.

    Raises: AssertionError if it runs for longer than `timeout_s`.
    """
    with tempfile.TemporaryDirectory() as scratch:
        files = [Path(scratch) / name for name in ("stdout", "stderr")]
        order = {
            "code": textwrap.dedent(code),
            "argv": ["-c", *map(str, arguments)],
            "environment": dict(os.environ) | environment,
            "directory": os.getcwd(),
            "files": [str(path) for path in files],
            "timeout_s": timeout_s,
        }
        server = _server()
        assert server.stdin
        assert server.stdout
        server.stdin.write(json.dumps(order) + "\n")
        server.stdin.flush()
        ended = json.loads(server.stdout.readline())
        out, err = (path.read_text() for path in files)
    assert ended != HUNG, f"hung: {out}{err}"
    return Done(out, err, ended)


def started(*words: object, **environment: str) -> subprocess.Popen[str]:
    """An interpreter that is no fork, with these words of its command line, in the root of the repository."""
    path = {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command, variables = [sys.executable, *map(str, words)], os.environ | path | environment
    return subprocess.Popen(command, cwd=ROOT, env=variables, text=True, start_new_session=True, **pipes)


def ended(*words: object, timeout_s: float = 120, **environment: str) -> Done:
    """How such an interpreter ended.

    Raises: subprocess.TimeoutExpired for one that hangs.
    """
    with started(*words, **environment) as process:
        try:
            return Done(*process.communicate(timeout=timeout_s), process.returncode)
        except subprocess.TimeoutExpired:
            process.kill()
            raise


@functools.cache
def _server() -> subprocess.Popen[str]:
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    # At the end of this line all that the code has made is alive, as at the end of any program.
    code = "from tests.fresh import _serve; exec(compile(_serve(), '<string>', 'exec'))"
    # A fork may turn these warnings on; whether there are any is settled when an interpreter starts.
    command = [sys.executable, "-X", "warn_default_encoding", "-W", "ignore::EncodingWarning", "-c", code]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    server = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": path}, start_new_session=True, **pipes)
    atexit.register(server.communicate)  # it ends with its input
    return server


def _serve() -> str:
    """Forks for each order that comes; returns in the forks, with their code."""
    for name in IMPORTS:
        importlib.import_module(name)
    assert not [name for name in sys.modules if name.partition(".")[0] == "ssd_fx"]
    orders, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    for line in orders:
        order = json.loads(line)
        child = os.fork()
        if not child:
            os.close(orders.fileno())
            os.close(answers.fileno())
            _become(order)
            return str(order["code"])
        print(json.dumps(_ended(child, order["timeout_s"])), file=answers, flush=True)
    os._exit(0)


def _become(order: dict[str, Any]) -> None:
    os.setsid()
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    for target, opened in enumerate([os.open(os.devnull, os.O_RDONLY), *(os.open(f, flags) for f in order["files"])]):
        os.dup2(opened, target)
        os.close(opened)
    os.chdir(order["directory"])
    os.environ.clear()
    os.environ.update(order["environment"])
    sys.argv = order["argv"]


def _ended(child: int, timeout_s: float) -> int | str:
    """The status of a process and of all that it started, which end at the time limit."""
    watched = os.pidfd_open(child)
    in_time = select.select([watched], [], [], timeout_s)[0]
    os.close(watched)
    if not in_time:
        os.killpg(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return status if in_time else HUNG
