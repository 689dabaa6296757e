"""What people read: the dump of a plan, and `explain`."""
