"""How long drives last, and what that costs. docs/projection.md, sections 5 and 6.

The rated figure is what a vendor guarantees. The factors are assumptions of the reference paper (arXiv 2408.10013).
"""

from __future__ import annotations

from dataclasses import dataclass

from ssd_fx.projection.scenario import Drives
from ssd_fx.projection.traffic import Traffic
from ssd_fx.runtime.wear import DAY_S, rated_days

PAPER_WAF = 2.5  # write amplification in the workload that TBW is rated for; large sequential writes have about 1
PAPER_RETENTION = 86.0  # more cycles if data need to last for 1 day only, instead of 3 years


@dataclass(frozen=True, kw_only=True)
class Endurance:
    """Life in days and cost in US dollars, of the drives of one GPU. Costs are 0 where the price is not known.

    bytes_per_day: of what the drives keep up with. rated_days: until the rated TBW is written.
    paper_waf_days: with the paper's write amplification. paper_days: with its retention as well.
    wear_usd_per_day: of the price of the drives, by rated TBW.
    """

    bytes_per_day: float
    rated_days: float
    paper_waf_days: float
    paper_days: float
    drives_usd: float
    wear_usd_per_day: float


def endurance(traffic: Traffic, drives: Drives) -> Endurance:
    """The life of `drives` that get `traffic` day and night, or the share of it that they keep up with."""
    bytes_per_day = traffic.bytes_per_day * traffic.share(drives)
    days = rated_days(drives.rated_tb, bytes_per_day / DAY_S)
    return Endurance(
        bytes_per_day=bytes_per_day,
        rated_days=days,
        paper_waf_days=days * PAPER_WAF,
        paper_days=days * PAPER_WAF * PAPER_RETENTION,
        drives_usd=drives.price_usd,
        wear_usd_per_day=drives.price_usd / days,
    )
