"""Lock that gives a checkpoint folder one writer at a time.

Two runs that write into one folder could delete each other's checkpoints.  A file that marks the folder as in use would
outlive a killed writer, so the lock is `flock` on a file in the folder.  When the process exits or is killed, the
kernel releases the lock; on NFS the server does.  The file's text names the writer, for error messages only.
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

_LOCK_FILE = ".lock"
#: Error numbers of ``flock`` on file systems without locks.
_UNSUPPORTED_ERRNOS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL}


class FolderLock:
    """Exclusive lock of writers of one existing folder; readers need none.

    A copy of this object, by `copy` or `pickle`, does not hold the lock.  ``is_exclusive`` is False on file systems
    without locks, and before `acquire`.
    """

    def __init__(self, folder: Path):
        self.lock_file = folder / _LOCK_FILE
        self.is_exclusive = False
        self._fd: int | None = None
        _locks.add(self)

    @property
    def is_held(self) -> bool:
        """Whether this object holds the lock."""
        return self._fd is not None

    def acquire(self) -> None:
        """Acquire the lock, which this object does not hold, without waiting.

        On a file system without locks, this warns, and the object's lock excludes no other writer.  If another object
        holds the lock, BlockingIOError names its process and host.
        """
        fd = os.open(self.lock_file, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.is_exclusive = True
        except BlockingIOError:
            owner = os.pread(fd, 1000, 0).decode(errors="replace").strip() or "another process"
            owner += " (this one)" if owner == _describe_this_process() else ""
            os.close(fd)
            raise BlockingIOError(errno.EWOULDBLOCK, owner) from None
        except OSError as error:
            if error.errno not in _UNSUPPORTED_ERRNOS:
                os.close(fd)
                raise
            self.is_exclusive = False
            message = f"{self.lock_file.parent}: its file system has no locks ({error}): let one run write there"
            warnings.warn(message, RuntimeWarning, stacklevel=4)
        self._fd = fd
        with contextlib.suppress(OSError):  # if the disk is full, errors do not name the writer
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{_describe_this_process()}\n".encode(), 0)

    def release(self) -> None:
        """Release the lock, if this object holds it."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    __del__ = release

    def __reduce__(self) -> tuple[type[FolderLock], tuple[Path]]:
        return FolderLock, (self.lock_file.parent,)


def _describe_this_process() -> str:
    """Return this process's name in the locked file."""
    return f"process {os.getpid()} on host {platform.node()}"


#: All locks of this process.
_locks: weakref.WeakSet[FolderLock] = weakref.WeakSet()


def _release_in_child() -> None:
    """Close a forked process's copies of the files: a lock is held until its last copy is closed."""
    for lock in list(_locks):
        lock.release()


os.register_at_fork(after_in_child=_release_in_child)
