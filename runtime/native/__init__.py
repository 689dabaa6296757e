"""The pool of I/O threads (C), the allocator of large CPU tensors (C++), and what builds and loads them."""
