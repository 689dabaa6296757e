"""The joint graph, before and while it is cut: marks, stale views, changed inputs, recomputation."""
