"""Shared libraries of the tests' own C and C++ sources."""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

C = (os.environ.get("CC", "cc"), "-std=gnu11", "-Wall", "-Werror", "-pthread")


def library(source: Path, command: Sequence[str] = C, behind: Sequence[str] = (), among: Iterable[Path] = ()) -> Path:
    """The library of `source`, compiled at first use into the user's cache under a name that depends on all of this.

    `command`: the compiler and its flags; `behind`: flags that stand behind the source; `among`: what it includes.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ssd_fx"
    key = b"".join(path.read_bytes() for path in (source, *sorted(among))) + repr((command, behind)).encode()
    path = cache / f"{source.stem}-{hashlib.sha256(key).hexdigest()[:16]}.so"
    if not path.exists():
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            built = Path(scratch) / path.name
            subprocess.run([*command, "-shared", "-fPIC", "-o", built, source, *behind], check=True)
            built.replace(path)  # whole or not at all, whoever else compiles it now
    return path
