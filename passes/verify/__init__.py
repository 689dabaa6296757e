"""Holds plans and rewritten graphs to what must be true of them."""
