"""The pool of I/O threads, in C and in Python, and what loads it."""
