"""Texts for people: the dump of a plan, in which equal layers are folded, and the page of options."""
