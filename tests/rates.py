"""Rates for plans in tests."""

from __future__ import annotations

# Transfers take no time, so nothing is needed before it would be written: every write begins at once.
QUICK = {"write_bw": 1e15, "read_bw": 1e15, "latency_s": 0.0}
QUICK |= {"to_host_bw": 1e15, "from_host_bw": 1e15, "host_latency_s": 0.0}
