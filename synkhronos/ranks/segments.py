"""Shared memory that all ranks map.

`Segment`
    One POSIX shared memory object, mapped into this process.
`SegmentTable`
    The segments that one rank has mapped, by key.
`SharedArray`
    Where an array lies: what a command carries in place of the array.

The master makes a segment and unlinks its name at once; workers get it as an open file over the socket pair
that each of them inherited at the fork.  So no name stays in ``/dev/shm`` for longer than the two system calls
take, and none can be guessed meanwhile: it is random, and the object is open to this user alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import secrets
import socket
import struct
import weakref
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import posix_ipc

_ANNOUNCEMENT = struct.Struct("=QQ")  # key, bytes
#: The user may have given SIGPIPE its deadly meaning back.
_NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)


def create_unlinked(nbytes: int) -> int:
    """Make a shared memory object of ``nbytes`` without a name, and return its file descriptor.

    The pages are allocated here and now: a full ``/dev/shm`` is a MemoryError in this call, not a bus error
    at some later write.
    """
    while True:
        name = f"/synkhronos-{secrets.token_hex(16)}"
        try:
            fd = posix_ipc.SharedMemory(name, posix_ipc.O_CREX, mode=0o600).fd
        except posix_ipc.ExistentialError:
            continue
        break
    posix_ipc.unlink_shared_memory(name)
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, nbytes)
        else:
            os.ftruncate(fd, nbytes)
    except (OSError, OverflowError) as error:  # the latter for more than the kernel can count
        os.close(fd)
        if isinstance(error, OverflowError) or error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            raise MemoryError(
                f"no room for {nbytes:,} bytes of shared memory: see `df -h /dev/shm`, free Data objects that are no "
                "longer needed, or start the container with a larger --shm-size"
            ) from error
        raise
    return fd


class Segment:
    """A shared memory object, mapped into this process.

    The memory lives until every process has dropped its mapping, and a mapping until the last NumPy view of it
    has gone: freeing a segment can't pull memory away from under an array.
    """

    __slots__ = ("buffer", "key", "nbytes")

    def __init__(self, key: int, fd: int, nbytes: int):
        self.key = key
        self.nbytes = nbytes
        self.buffer = _map(fd, nbytes)

    def array(self, shape: tuple[int, ...], dtype: npt.DTypeLike, offset: int = 0) -> np.ndarray:
        """Return a view of the segment's memory as an array."""
        return np.ndarray(shape, dtype, cast(Any, self.buffer), offset)


class SharedArray(NamedTuple):  # a tuple, because these are pickled with every call
    """Where an array lies in shared memory."""

    key: int
    dtype: str
    shape: tuple[int, ...]
    offset: int = 0

    def view(self, segments: SegmentTable) -> np.ndarray:
        """Return the array itself, as a view of this rank's mapping."""
        return segments[self.key].array(self.shape, self.dtype, self.offset)


class SegmentTable:
    """The segments that a rank has mapped, by key; the same keys on every rank."""

    def __init__(self) -> None:
        self._segments: dict[int, Segment] = {}

    def __getitem__(self, key: int) -> Segment:
        return self._segments[key]

    def __len__(self) -> int:
        return len(self._segments)

    def add(self, segment: Segment) -> None:
        """Enter a segment; one that is there already (announced twice after an interrupt) stays."""
        self._segments.setdefault(segment.key, segment)

    def drop(self, key: int) -> None:
        """Forget a segment; its memory goes with the last view of it."""
        self._segments.pop(key, None)

    def clear(self) -> None:
        """Forget all segments."""
        self._segments.clear()


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FAILED = ctypes.c_void_p(-1).value


def _map(fd: int, nbytes: int) -> ctypes.Array[ctypes.c_char]:
    """Map shared memory, until the last reference to what is returned has gone.

    Python's own mmap objects hold a file descriptor each, of which a process may have a thousand or so.
    """
    address = _libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
    if address == _FAILED:
        error = ctypes.get_errno()
        raise MemoryError(f"{nbytes:,} bytes of shared memory can't be mapped: {os.strerror(error)}")
    buffer = (ctypes.c_char * nbytes).from_address(address)
    # Not at exit, when arrays may still be there: the system takes the memory back by itself.
    weakref.finalize(buffer, _libc.munmap, address, nbytes).atexit = False
    return buffer


def announce(channel: socket.socket, key: int, nbytes: int, fd: int) -> None:
    """Send a segment to the worker at the other end of ``channel``; to one that has died, nothing."""
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", fd))
    # Whoever waits for the worker next notices its death, and can say more of it than this.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        channel.sendmsg([_ANNOUNCEMENT.pack(key, nbytes)], [rights], _NO_SIGNAL)


def receive(channel: socket.socket) -> Segment:
    """Receive the next announced segment and map it."""
    message, fds, _, _ = socket.recv_fds(channel, _ANNOUNCEMENT.size, 1)
    if not fds:
        raise EOFError("the master closed the channel")
    key, nbytes = _ANNOUNCEMENT.unpack(message)
    try:
        return Segment(key, fds[0], nbytes)
    finally:
        os.close(fds[0])
