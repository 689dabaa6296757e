"""Puts the nodes of a plan into both graphs."""
