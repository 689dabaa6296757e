"""Tensors, and where their memory comes from."""
