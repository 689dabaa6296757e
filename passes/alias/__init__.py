"""Which saved tensors share a storage, what of it is stored, and which of them are copies of others."""
