"""Which saved tensors share a storage, which part of it is stored, and which tensors are copies of others."""
