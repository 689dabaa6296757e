"""How worn an NVMe drive is: its SMART log, read with the ioctl that nvme-cli uses.

Source: NVM Express base specification 2.0, "SMART / Health Information (Log Identifier 02h)"; linux/nvme_ioctl.h.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
from dataclasses import dataclass

_ADMIN_COMMAND = 0xC0484E41  # _IOWR('N', 0x41, struct nvme_admin_cmd)
_GET_LOG_PAGE, _SMART, _ALL_NAMESPACES = 0x02, 0x02, 0xFFFFFFFF
_LOG_BYTES = 512
_UNIT_BYTES = 512_000  # a "data unit" is 1000 blocks of 512 bytes
_COMMAND = "<BBHIIIQQIIIIIIIIII"  # opcode, flags, rsvd, nsid, cdw2, cdw3, metadata, addr, lengths, cdw10 to 15, times


@dataclass(frozen=True)
class Wear:
    """What a drive says of its life. `used_percent`: of its rated endurance, by its maker; it may go beyond 100."""

    written_bytes: int
    used_percent: int
    spare_percent: int
    media_errors: int

    @property
    def endurance_bytes(self) -> float:
        """What the drive takes in all, if the rest of its life wears it as the past did; 0 below 1% used."""
        return 100 * self.written_bytes / self.used_percent if self.used_percent else 0.0


def parse(log: bytes) -> Wear:
    """What the SMART log says; its numbers are little-endian."""
    return Wear(
        written_bytes=int.from_bytes(log[48:64], "little") * _UNIT_BYTES,
        used_percent=log[5],
        spare_percent=log[3],
        media_errors=int.from_bytes(log[160:176], "little"),
    )


def read(controller: str, directory: str = "/dev") -> Wear:
    """The wear of an NVMe controller such as "nvme0".

    Raises:
        OSError: it cannot be opened or asked. Usually root may, and nobody else.
    """
    path = os.path.join(directory, controller)
    device = os.open(path, os.O_RDONLY)
    try:
        log = ctypes.create_string_buffer(_LOG_BYTES)
        length = (_LOG_BYTES // 4 - 1) << 16 | _SMART  # in words of 4 bytes, less one
        wanted = (_GET_LOG_PAGE, 0, 0, _ALL_NAMESPACES, 0, 0, 0, ctypes.addressof(log), 0, _LOG_BYTES, length)
        command = bytearray(struct.pack(_COMMAND, *wanted, *[0] * 7))
        status = fcntl.ioctl(device, _ADMIN_COMMAND, command)
        if status:
            raise OSError(errno.EIO, f"the drive refuses its SMART log with NVMe status {status:#x}", path)
    finally:
        os.close(device)
    return parse(log.raw)
