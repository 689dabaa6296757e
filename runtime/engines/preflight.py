"""Checks of a directory before activations are written there."""

import ctypes
import errno
import os
import tempfile

_HELP = {
    errno.EACCES: "no permission to create files here; give this user write permission",
    errno.EROFS: "this file system is mounted read-only; name a directory on a drive that can be written to",
}
_IN_MEMORY = {0x01021994: "tmpfs", 0x858458F6: "ramfs"}


def check_directory(path: str, allow_tmpfs: bool = False) -> None:
    """Returns if activations can be written to `path`.

    Raises: FileNotFoundError, NotADirectoryError, PermissionError, or OSError for a file system in RAM. Each names the
    path and says what would be right.
    """
    if not os.path.exists(path):
        raise FileNotFoundError(2, "the directory for activations does not exist; create it on an NVMe drive", path)
    if not os.path.isdir(path):
        raise NotADirectoryError(20, "activations need a directory, and this is something else", path)
    try:
        tempfile.TemporaryFile(
            dir=path
        ).close()  # access(2) allows root everything, ignores quotas, and gives no reason
    except OSError as error:
        code = error.errno or errno.EIO
        message = _HELP.get(code, f"no file can be made here ({error.strerror}); name a directory on a drive")
        raise OSError(code, message, path) from None  # EACCES makes a PermissionError
    kind = _IN_MEMORY.get(file_system_type(path))
    if kind and not allow_tmpfs:
        message = f"this is a {kind}, which keeps files in RAM and would save none; name a directory on a drive"
        raise OSError(22, f"{message} with dirs or SSD_FX_DIRS, or set allow_tmpfs for a test", path)


def file_system_type(path: str) -> int:
    """`f_type` of statfs(2).

    Raises: OSError if statfs fails.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = (ctypes.c_long * 64)()  # far more than struct statfs, which begins with f_type
    if libc.statfs(os.fsencode(path), ctypes.byref(buffer)) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), path)
    return buffer[0] & 0xFFFFFFFF
