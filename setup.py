"""The native pool and the long description; everything else is in pyproject.toml.

A plain shared object without Python.h, loaded with ctypes: so one wheel is for every Python 3. Optional: without a
compiler the install goes on, and the pool is built at its first use. The hash over the sources is that of
`runtime/native/loader.py`, which checks it: a library that was built from other sources is not used.
"""

import hashlib
import os
import re
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

FILES = sorted(path for path in Path("runtime", "native").iterdir() if path.suffix in (".c", ".h"))
HASH = hashlib.sha256(b"".join(path.read_bytes() for path in FILES)).hexdigest()[:16]

LINK = re.compile(r"!?\[([^\]]+)\]\((?!https?://)([^)#]+)[^)]*\)")
README = Path("README.md").read_text(encoding="utf-8")

# An editable install puts the checkout on the path and uses the links ssd_fx/passes and ssd_fx/runtime. With the other
# folders setuptools would install a finder, which comes last: a script beside a clone named ssd_fx would import the
# clone as an empty namespace package.
EDITABLE = {"": "."}
FOLDERS = {"ssd_fx.passes": "passes", "ssd_fx.runtime": "runtime"}


class OfNoPython(build_ext):
    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")) + ".so"


class ForEveryPython(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        """For every Python 3, on every Linux whose glibc has what the pool asks for (PEP 600)."""
        platform: str = super().get_tag()[2]
        found = [path.read_bytes() for path in Path(self.bdist_dir or ".").rglob("_iopool.so")]
        asked = [int(minor) for each in found for minor in re.findall(rb"GLIBC_2\.(\d+)", each)]
        if asked and platform.startswith("linux_"):
            platform = f"manylinux_2_{max(17, *asked)}_{platform.removeprefix('linux_')}"
        return "py3", "none", platform


setup(
    cmdclass={"build_ext": OfNoPython, "bdist_wheel": ForEveryPython},
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
