"""The parts of the pages in docs/ that programs make: code, what it prints, what commands print.

python examples/excerpts.py            # which pages are not as their programs make them
python examples/excerpts.py --write    # and makes them so

Such a part is a fenced block behind a comment that names its program:

<!-- code: examples/tutorial.py train -->           a part of a script, from `# --- train` to the next part
<!-- prints: examples/tutorial.py train -->         what that part prints
<!-- command: ssd-fx fit examples/tutorial.py -->   what the command prints
<!-- excerpt: plan -->                              of examples/how_it_works.py, and `inductor:` of its slow half

Plans are made for typical rates of two cores, so a page is the same on every machine. What is measured in a run may
differ: a block that differs in nothing else stays as it is.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Collection
from pathlib import Path

import how_it_works

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))
_PART = re.compile(r"^# --- (\w+)\n", re.MULTILINE)
_BLOCK = re.compile(r"(<!-- (\w+): ([^>]+?) -->\n```\w*\n)(.*?)\n```", re.DOTALL)
_VARIES = [
    (r"(prefetched|cancelled|wasted|held) .*\n", ""),  # rows that are there at times
    (r"(?m)^((?:written|read|forwarded|freed) +)[\d.]+", r"\1…"),  # where the bytes were when the backward asked
    (r"[\d.]+(?= ms of stall| TB are written)", "…"),
    (r"(?<=on disk at the moment: )[\d.]+", "…"),
]


def code(path: str, part: str) -> str:
    """A part of a script."""
    return _parts(path, (ROOT / path).read_text())[part]


def prints(path: str, part: str) -> str:
    """What a part of a script prints."""
    return _parts(path, _printed(path))[part]


@functools.cache
def command(*words: str) -> str:
    """What a command of ours prints.

    Raises:
        ValueError: it is not `ssd-fx`.
        subprocess.CalledProcessError: its status is not 0.
    """
    if words[0] != "ssd-fx":
        raise ValueError(f"{shlex.join(words)} is no command of ours; right would be one that begins with ssd-fx")
    return _run([sys.executable, "-m", "ssd_fx", *words[1:]])


def excerpt(name: str) -> str:
    """An excerpt of the toy's graphs."""
    return _toy()[name]


def inductor(name: str) -> str:
    """An excerpt of what Inductor makes of the toy."""
    return _toy_by_inductor()[name]


MAKERS: dict[str, Callable[..., str]] = {maker.__name__: maker for maker in (code, excerpt, prints, command, inductor)}
QUICK = ("code", "excerpt")  # those that take a second


def blocks(page: str) -> list[str]:
    """What the programs of a page are given: `code: examples/tutorial.py train`."""
    return [f"{kind}: {what}" for _, kind, what, _ in _BLOCK.findall(page)]


def filled(page: str, kinds: Collection[str] = tuple(MAKERS)) -> str:
    """The text of a page with blocks of these kinds made now; the others stay as they are.

    Raises:
        KeyError: a comment names what no program makes.
    """

    def made(block: re.Match[str]) -> str:
        head, kind, what, old = block.groups()
        if kind not in kinds:
            return block[0]
        new = MAKERS[kind](*shlex.split(what))
        return f"{head}{old if masked(old) == masked(new) else new}\n```"

    return _BLOCK.sub(made, page)


def masked(text: str) -> str:
    """The text without what differs from run to run."""
    for varies, instead in _VARIES:
        text = re.sub(varies, instead, text)
    return text


def _parts(path: str, text: str) -> dict[str, str]:
    _, *found = _PART.split(text)
    if not found:
        raise KeyError(f"{path} has no part; right would be a line such as '# --- train'")
    return {name: part.strip() for name, part in zip(found[::2], found[1::2], strict=True)}


@functools.cache
def _printed(path: str) -> str:
    """What a script prints, with a line `# --- NAME` before what each part prints."""
    script = _PART.sub(r'print("# --- \1", flush=True)\n', (ROOT / path).read_text())
    return _run([sys.executable, "-"], script)


def _run(words: list[str], script: str | None = None) -> str:
    paths = [str(ROOT / "examples"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    same = {"SSD_FX_MACHINE": "default", "OMP_NUM_THREADS": "2"}
    environment = os.environ | same | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run(words, input=script, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.strip()


_toy = functools.cache(how_it_works.excerpts)
_toy_by_inductor = functools.cache(how_it_works.inductor_excerpts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", type=Path, default=PAGES, help="files; default: all of docs/")
    parser.add_argument("--write", action="store_true", help="put into the pages what is made now")
    flags = parser.parse_args()
    status = 0
    for path in flags.pages:
        page = path.read_text()
        made = filled(page)
        if made != page:
            print(f"{path}: {'written' if flags.write else 'not as its programs make it'}")
            status = 0 if flags.write else 1
        if flags.write:
            path.write_text(made)
    return status


if __name__ == "__main__":
    sys.exit(main())
