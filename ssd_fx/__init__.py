"""Train with the saved activations on NVMe: `torch.compile(model, backend=ssd_fx.backend)`."""

# First: under an unknown torch the imports below may fail with a message that does not name the cause.
from ssd_fx import versions  # noqa: F401

# isort: split
from ssd_fx.backend import backend, check_options
from ssd_fx.checkpoints import checkpoint
from ssd_fx.config import Config
from ssd_fx.estimate import estimate
from ssd_fx.explain import explain, report
from ssd_fx.marks import keep, offload
from ssd_fx.policy import SavedTensor
from ssd_fx.report.budgets import Estimate, Prediction
from ssd_fx.report.dump import Explanation
from ssd_fx.report.model import GraphReport, GroupRow
from ssd_fx.report.report import Report
from ssd_fx.runtime.chrome import export as export_trace
from ssd_fx.runtime.graphs import close
from ssd_fx.runtime.stats import GraphStats, Stats, reset_stats, stats

__all__ = [
    "Config",
    "Estimate",
    "Explanation",
    "GraphReport",
    "GraphStats",
    "GroupRow",
    "Prediction",
    "Report",
    "SavedTensor",
    "Stats",
    "backend",
    "check_options",
    "checkpoint",
    "close",
    "estimate",
    "explain",
    "export_trace",
    "keep",
    "offload",
    "report",
    "reset_stats",
    "stats",
]
__version__ = "0.1.0"
