"""The digest of the package's source, which is a part of the keys of compile caches."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from ssd_fx import passes, runtime


@cache
def source_digest() -> str:
    """The digest of every Python file of the package. It keeps a new version from the cached graphs of an old one."""
    return digest([Path(__file__).parent, passes.__path__[0], runtime.__path__[0]])


def digest(folders: Iterable[str | Path]) -> str:
    """The digest of names and contents of all Python files in `folders`, at any depth, each file once."""
    found: dict[Path, str] = {}
    for folder in folders:
        root = Path(folder).resolve()
        for file in root.rglob("*.py"):
            found.setdefault(file, f"{root.name}/{file.relative_to(root)}")
    total = hashlib.sha256()
    for file, name in sorted(found.items(), key=lambda item: item[1]):
        total.update(f"{name}\n".encode())
        total.update(hashlib.sha256(file.read_bytes()).digest())
    return total.hexdigest()
