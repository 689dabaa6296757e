"""What people read of a plan: tables, with layers that are alike told once."""
