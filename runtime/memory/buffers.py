"""Page-aligned memory that belongs to no tensor."""

import errno

import torch

PAGE = 4096
ALIGN = 64 << 10  # the coarsest alignment that direct I/O asks for, on drives with large blocks


class Buffer:
    """`nbytes` of memory at `address`, a page boundary, with any content. They are freed with this object.

    Raises: OSError if there is no memory.
    """

    __slots__ = ("_memory", "address")

    def __init__(self, nbytes: int) -> None:
        try:
            self._memory = torch.empty(nbytes + PAGE, dtype=torch.uint8, device="cpu")
        except RuntimeError as error:
            raise OSError(errno.ENOMEM, f"no memory for a buffer of {nbytes} B") from error
        start = self._memory.data_ptr()
        self.address = start + -start % PAGE
