"""Decides for all alias groups together: a simulated step, and a search over its plans."""
