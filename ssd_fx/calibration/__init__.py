"""Measures the rates of this machine, once."""
