"""Compiles native code once, into the user's cache. Files come there whole."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path


def cache_home() -> Path:
    """The user's directory for caches. A relative `XDG_CACHE_HOME` is ignored, as its specification says.

    Raises: FileNotFoundError if there is no home directory, as for a user whom the system does not know.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):
        base = os.path.join(os.path.expanduser("~"), ".cache")
    if not os.path.isabs(base):
        raise FileNotFoundError("neither XDG_CACHE_HOME nor HOME names an absolute directory")
    return Path(base)


def cache_directory() -> Path:
    """The directory for libraries, which is made. We load code from there, so nobody else may write to it.

    Raises: OSError if it cannot be made, or another user could write to it.
    """
    path = cache_home() / "ssd_fx"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise PermissionError(f"{path} must belong to this user and be writable by nobody else")
    return path


def compile_library(target: Path, compiler: str, arguments: Sequence[str]) -> None:
    """Makes the shared library `target`, whole or not at all, whoever else makes it now.

    Raises: OSError, or subprocess.SubprocessError with what the compiler said.
    """
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        built = Path(scratch) / target.name
        command = [compiler, "-O2", "-shared", "-fPIC", "-pthread", *arguments, "-o", str(built)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
        os.replace(built, target)


def replace_text(target: Path, text: str) -> None:
    """Writes a file in one move: a reader sees the old one or the new one. An error leaves nothing behind."""
    part = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, target)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise


def failure(error: BaseException) -> str:
    """What went wrong, with what the compiler said."""
    said = (getattr(error, "stderr", None) or "").strip()
    return f"{error}: {said}" if said else str(error)
