"""Where bytes go: engines behind one interface, and the extents of their files."""
