"""The page docs/options.md, made from the docstring and the defaults of `ssd_fx.Config`.

python docs/options.py > docs/options.md
"""

from __future__ import annotations

import inspect
import re
import textwrap
from dataclasses import fields

from ssd_fx.config import Config
from ssd_fx.sizes import format_bytes

_HEAD = """# Options

This page is made from the docstring of `ssd_fx.Config` by `python docs/options.py`.

Pass options as `torch.compile(model, backend=ssd_fx.backend, options={"dirs": ["/mnt/nvme"], "budget": "2GiB"})`.
Or set them in the environment as `SSD_FX_<NAME>`. `options` wins over the environment. An unknown name or a bad value
is a `ValueError` that names the right ones. torch compiles the model, and so checks its options, when the model first
runs; `ssd_fx.check_options({...})` checks them at once.

A *size* is a number of bytes or text such as `"512MiB"`, `"1.5G"` (1.5 GiB) or `"2GB"` (2 * 10^9 bytes). A *share* is
a float from 0 to 1, or text such as `"25%"`. A *flag* is a bool; in the environment `1`, `true`, `yes`, `on` or `0`,
`false`, `no`, `off`.
"""
_OPTION = re.compile(r"^(\w+) \((.+?)\): ", re.DOTALL | re.MULTILINE)


def page() -> str:
    """Return the text of the page, with every option in the order of `Config`'s fields."""
    head, *parts = _OPTION.split(inspect.getdoc(Config) or "")
    shared = head.split("\n\n", 1)[1].strip()
    names, kinds, texts = parts[0::3], parts[1::3], parts[2::3]
    sections = [_section(*option) for option in zip(names, kinds, texts, strict=True)]
    return "\n".join([_HEAD, _filled(shared), "", *sections])


def _section(name: str, kind: str, text: str) -> str:
    """The part of the page about one option."""
    described, _, default = text.partition("Default:")
    shown = " ".join(default.split()).rstrip(".") or _default(name, kind)
    facts = _filled(f"*{kind}; default: {shown}*")
    return "\n".join([f"## {name}\n", facts, "", _filled(described), ""])


def _filled(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), 120, break_long_words=False, break_on_hyphens=False)


def _default(name: str, kind: str) -> str:
    default = next(field.default for field in fields(Config) if field.name == name)
    if default in ("", (), None):
        return "none"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    if isinstance(default, float):
        return str(default)
    if isinstance(default, int):
        return format_bytes(default) if kind.startswith("a size") and default else str(default)
    return f'`"{default}"`'


if __name__ == "__main__":
    print(page(), end="")
