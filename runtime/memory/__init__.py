"""Tensors, their layouts, and where their memory comes from."""
