"""Check that plans and rewritten graphs keep their rules."""
