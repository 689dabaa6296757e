"""What people read: the report of a step and its page, the dump of a plan, the table of budgets."""
