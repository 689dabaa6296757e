"""Devices with streams: order, clocks, times of nodes."""
