"""The runtime of ssd_fx: executes store, release, load and wait nodes; knows nothing of FX or of plans.

Importing `ssd_fx.runtime.ops` registers the operators. Everything else is reached through their arguments.
"""

if __name__ != "ssd_fx.runtime":
    raise ImportError(f"import ssd_fx.runtime, not {__name__!r}: the operators would be registered twice")
