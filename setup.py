"""The native pool and the long description; everything else is in pyproject.toml.

A plain shared object without Python.h, loaded with ctypes. Optional: without a compiler the install goes on, and the
pool is built at its first use. The hash over the sources is that of `runtime/native/loader.py`, which checks it: a
library that was built from other sources is not used.
"""

import hashlib
import re
import sys
from pathlib import Path

from setuptools import Extension, setup

FILES = sorted(path for path in Path("runtime", "native").iterdir() if path.suffix in (".c", ".h"))
HASH = hashlib.sha256(b"".join(path.read_bytes() for path in FILES)).hexdigest()[:16]

LINK = re.compile(r"\[([^\]]+)\]\((?!https?://)([^)#]+)[^)]*\)")
README = Path("README.md").read_text(encoding="utf-8")

# An editable install puts the checkout on the path and uses the links ssd_fx/passes and ssd_fx/runtime. With the other
# folders setuptools would install a finder, which comes last: a script beside a clone named ssd_fx would import the
# clone as an empty namespace package.
EDITABLE = {"": "."}
FOLDERS = {"ssd_fx.passes": "passes", "ssd_fx.runtime": "runtime"}

setup(
    package_dir=EDITABLE if "editable_wheel" in sys.argv else FOLDERS,
    # A package index shows this text alone, so links to files beside it would lead nowhere: they become names.
    long_description=LINK.sub(lambda link: link[2] if link[1] == link[2] else f"{link[1]} (`{link[2]}`)", README),
    long_description_content_type="text/markdown",
    ext_modules=[
        Extension(
            "ssd_fx.runtime.native._iopool",
            sources=["runtime/native/iopool.c"],
            depends=[str(path) for path in FILES],
            define_macros=[("IOPOOL_SOURCE_HASH", f'"{HASH}"')],
            extra_compile_args=["-O2", "-pthread", "-std=gnu11"],
            extra_link_args=["-pthread"],
            optional=True,
        )
    ],
)
