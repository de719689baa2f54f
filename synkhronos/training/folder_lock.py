"""Exclusive writing into a folder.

A checkpoint folder has one writer at a time.  The lock is `flock` on a file in the folder: the kernel releases it when
the process exits, even by a kill; on NFS the server does.  The file's text names the writer, for the error message
only.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import platform
import warnings
import weakref
from pathlib import Path

_NAME = ".lock"
#: Errors of file systems that have no locks.
_UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL}


class FolderLock:
    """Lock of one folder; readers need none.

    Parameters
    ----------
    folder : Path
        An existing folder.

    Attributes
    ----------
    is_held : bool
        Whether this object holds the lock.
    is_exclusive : bool
        Whether no other process can hold it; False on file systems without locks.
    """

    def __init__(self, folder: Path):
        self.path = folder / _NAME
        self.is_exclusive = False
        self._file: int | None = None
        _locks.add(self)

    @property
    def is_held(self) -> bool:
        """Whether this object holds the lock."""
        return self._file is not None

    def acquire(self) -> None:
        """Take the lock, if this object does not hold it already.

        Raises
        ------
        BlockingIOError
            If another object holds it, in this process or another; the message names the process and its host.
        """
        if self._file is not None:
            return
        file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.is_exclusive = True
        except BlockingIOError:
            owner = os.pread(file, 1000, 0).decode(errors="replace").strip() or "another process"
            owner += " (this one)" if owner == _this_process() else ""
            os.close(file)
            raise BlockingIOError(errno.EWOULDBLOCK, owner) from None
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                os.close(file)
                raise
            self.is_exclusive = False
            message = f"{self.path.parent}: its file system has no locks ({error}): let one training write there"
            warnings.warn(message, RuntimeWarning, stacklevel=4)
        self._file = file
        with contextlib.suppress(OSError):  # on a full disk the message does not name the writer
            os.ftruncate(file, 0)
            os.pwrite(file, f"{_this_process()}\n".encode(), 0)

    def release(self) -> None:
        """Release the lock, if this object holds it."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    __del__ = release

    def __reduce__(self) -> tuple[type[FolderLock], tuple[Path]]:
        return FolderLock, (self.path.parent,)  # a copy does not hold the lock


def _this_process() -> str:
    return f"process {os.getpid()} on host {platform.node()}"


_locks: weakref.WeakSet[FolderLock] = weakref.WeakSet()


def _release_in_child() -> None:
    """Close the copies in a forked process, which would hold the locks after the writer's exit."""
    for lock in list(_locks):
        lock.release()


os.register_at_fork(after_in_child=_release_in_child)
