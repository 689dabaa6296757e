"""Sphinx makes the site of README.md and the pages of docs/: `make docs`. Every page is Markdown, as GitHub shows it.

The source folder is the root of the repository, so a relative link leads to the same page in both places. Nothing is
loaded from elsewhere, neither when the site is built nor when it is read.
"""

from __future__ import annotations

from typing import Any

# What the reader finds on the left. Every page stands in one part; a test holds that, and so does the build.
NAVIGATION = {
    "Start": [
        "docs/tutorial",
        "docs/when-not-to-use",
        "docs/using",
        "docs/budget",
        "docs/options",
        "docs/api",
        "docs/trainers",
    ],
    "Guides": [
        "docs/report",
        "docs/troubleshooting",
        "docs/performance",
        "docs/faq",
        "docs/machines",
        "docs/wear",
        "docs/projection",
        "docs/gpu",
    ],
    "Change the code": [
        "docs/how-it-works",
        "docs/glossary",
        "docs/design",
        "docs/planner",
        "docs/runtime",
        "docs/decisions",
        "docs/roadmap",
        "CONTRIBUTING",
    ],
    "Results": [
        "docs/pareto",
        "docs/compatibility",
        "docs/results/measurements",
        "docs/results/peaks",
        "docs/results/paper/benchmarks",
        "docs/results/gpu/README",
        "docs/results/pareto/2026-11-29",
        "docs/results/slow-step/2026-11-27",
        "docs/results/long-context",
        "docs/results/planted",
        "CHANGELOG",
    ],
}

project = "ssd_fx"
copyright = "the authors of ssd_fx. Licence: Apache-2.0"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
root_doc = "README"
include_patterns = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/**.md"]
exclude_patterns = [".*", "build", "demo-out"]  # not to be searched for pages
suppress_warnings = ["myst.header"]  # records of programs begin their tables with small headings
highlight_language = "text"  # of blocks that name no language
myst_heading_anchors = 3

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
napoleon_use_ivar = True  # attributes as a list
default_role = "code"  # docstrings quote as Markdown does

html_theme = "furo"
html_title = "ssd_fx"
html_show_sphinx = False
html_copy_source = False
html_static_path = ["site"]
html_css_files = ["site.css"]
templates_path = ["site"]
html_additional_pages = {"index": "start.html"}  # leads to README.html


def navigation() -> str:
    """The hidden tables of contents that the front page gets."""
    head = "```{toctree}\n:hidden:\n:caption:"
    return "\n\n".join("\n".join([f"{head} {part}\n", *pages, "```"]) for part, pages in NAVIGATION.items())


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _add_navigation)


def _add_navigation(_: Any, page: str, source: list[str]) -> None:
    if page == root_doc:
        source[0] += f"\n\n{navigation()}\n"
