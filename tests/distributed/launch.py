"""Jobs of several processes, started as users start them: by torchrun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RANKS_VARIABLES = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "RANK", "WORLD_SIZE")


def torchrun(*arguments: str, ranks: int = 2, timeout_s: float = 400, **variables: str) -> tuple[int, str]:
    """The exit status, and what all of them wrote; a job that hangs is ended, and a failure."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *arguments]
    environment = {name: value for name, value in os.environ.items() if name not in RANKS_VARIABLES}
    environment |= {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]), "OMP_NUM_THREADS": "1"}
    job = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = job.communicate(timeout=timeout_s)
    except BaseException as error:  # a Ctrl-C too, which only this session gets
        os.killpg(job.pid, signal.SIGTERM)  # torchrun ends its ranks, which have sessions of their own
        output, _ = job.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            pytest.fail(f"{arguments} hung: {output[-4000:]}")
        raise
    return job.returncode, output
