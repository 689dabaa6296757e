"""The options that the runtime obeys, which come as JSON in the arguments of the ops (`Options.runtime_json`)."""

import functools
import json
from urllib.parse import quote, unquote

from ssd_fx.options import Options
from ssd_fx.ranks import Ranks


def quoted(text: str) -> str:
    """`text`, percent-encoded, for generated code that does not escape quotes and backslashes. `parse` reads it too."""
    return quote(text, safe="")


@functools.lru_cache(maxsize=256)
def parse(text: str) -> Options:
    """The options in the JSON object `text`, which may be `quoted`.

    Missing keys take their defaults, but for the budget: without one nothing stays. Only `Options.runtime_json` writes
    such text, so the types of its values are not looked at.

    Raises: ValueError for what is no JSON object of options.
    """
    try:
        given = {"budget": 0} | json.loads(unquote(text) if text.startswith("%") else text)
        if "dirs" in given:
            given["dirs"] = tuple(given["dirs"])
        if "compression" in given:
            given["compression"] = tuple(sorted(given["compression"].items()))
        if "ranks" in given:
            given["ranks"] = Ranks(count=given["ranks"])
        return Options(**given)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the config of an ssd_fx op has no options: {error}: {text!r}") from error
