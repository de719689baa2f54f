"""Shared memory that all ranks map.

`Segment`
    One POSIX shared memory object, mapped into this process.
`Unmapped`
    One that there was no room for.
`SegmentTable`
    The segments that one rank has mapped, by key.
`SharedArray`
    Where an array lies: what a command carries in place of the array.
`map_file`
    Maps shared memory without keeping its file open.
`announce`, `Receiver`
    How segments come from the master to the workers.
`is_closed`
    Whether the other end of such a channel has gone.
`check_room`, `free_memory`
    Whether there is room for so much shared memory.

The master makes a segment without a name; workers get it as an open file over the socket pair that each of them
inherited at the fork.  So no crash leaves a name in ``/dev/shm``, and nobody else can open what has none.  (Where the
system makes none without, the name is random, for this user alone, and unlinked at once.)
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import io
import mmap
import os
import resource
import secrets
import socket
import struct
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import posix_ipc

from synkhronos.ranks.interrupts import defer_signals

_ANNOUNCEMENT = struct.Struct("=QQ?")  # key, bytes, whether it is a file
#: Bytes of shared memory from which on `check_room` looks at what is free.
_LARGE = 64 << 20
#: What makes room.
_ROOM = (
    "see `df -h /dev/shm`, free Data objects that are no longer needed, or start the container with a larger --shm-size"
)
#: Part of the free memory that is left to other programs.
_SPARED = 1 / 16


def check_room(nbytes: int) -> None:
    """Raise MemoryError if there is not so much room for shared memory: in ``/dev/shm``, and in memory.

    The kernel does not refuse what memory can't hold: it kills programs.
    """
    if nbytes < _LARGE:
        return
    with contextlib.suppress(FileNotFoundError):
        of = os.statvfs("/dev/shm")
        free, memory = of.f_bavail * of.f_frsize, int(free_memory() * (1 - _SPARED))
        if nbytes > min(free, memory):
            raise MemoryError(
                f"no room for {nbytes:,} bytes of shared memory: {_ROOM}; /dev/shm has {free:,} bytes left, and "
                f"memory {memory:,}"
            )


def free_memory(root: str = "") -> int:
    """Return the bytes of memory that this process could still take: of the machine's, and of its control groups'.

    ``root`` is the folder in which ``/proc`` and ``/sys`` are.
    """
    lines = Path(f"{root}/proc/meminfo").read_text().splitlines()
    kilobytes = {name: int(rest.split()[0]) for name, rest in (line.split(":") for line in lines)}
    free = (kilobytes["MemAvailable"] + kilobytes["SwapFree"]) << 10
    for line in Path(f"{root}/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            folder, names = Path(f"{root}/sys/fs/cgroup{path}"), ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            folder = Path(f"{root}/sys/fs/cgroup/memory{path}")
            names = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        for group in (folder, *folder.parents):
            # A group without a limit says "max"; a container sees its own group at the root, and not by its path.
            with contextlib.suppress(OSError, ValueError):
                limit, used = (int((group / name).read_text()) for name in names)
                stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                free = min(free, limit - used + int(stat["active_file"]) + int(stat["inactive_file"]))
    return max(0, free)


def create_unlinked(nbytes: int, runs: Iterable[range] | None = None) -> io.FileIO:
    """Make a shared memory object of ``nbytes`` without a name, and return it as an open file.

    The pages of some runs of bytes, by default all, are allocated here and now: a full ``/dev/shm`` is a MemoryError in
    this call, not a bus error at some later write.
    """
    runs = [range(nbytes)] if runs is None else [run for run in runs if run]
    wanted = sum(run.stop - run.start for run in runs)  # len() has a limit
    largest = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if nbytes > largest != resource.RLIM_INFINITY:
        raise MemoryError(
            f"no shared memory of {nbytes:,} bytes: this process may make no file of more than {largest:,} bytes, "
            "see `ulimit -f`"
        )
    check_room(wanted)
    with defer_signals():
        file = io.FileIO(_open_unlinked(), "r+")  # closed with the last reference, whatever happens
    try:
        os.ftruncate(file.fileno(), nbytes)
        for run in runs:
            os.posix_fallocate(file.fileno(), run.start, len(run))
    except (OSError, OverflowError) as error:  # the latter for more than the kernel can count
        file.close()
        if isinstance(error, OverflowError) or error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            raise MemoryError(f"no room for {wanted:,} bytes of shared memory: {_ROOM}") from error
        raise
    return file


def _open_unlinked() -> int:
    if hasattr(os, "O_TMPFILE"):
        try:
            return os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL, errno.EACCES):
                raise
    while True:
        name = f"/synkhronos-{secrets.token_hex(16)}"
        try:
            fd: int = posix_ipc.SharedMemory(name, posix_ipc.O_CREX, mode=0o600).fd
        except posix_ipc.ExistentialError:
            continue
        posix_ipc.unlink_shared_memory(name)
        return fd


class Segment:
    """A shared memory object, or a user's file, mapped into this process.

    The memory lives until every process has dropped its mapping, and a mapping until the last NumPy view of it
    has gone: freeing a segment can't pull memory away from under an array.  Of a file all processes read the system's
    one copy, and whoever writes has a copy of that page: the file stays as it is.

    Attributes
    ----------
    here : range
        The bytes that are there; of all others there are the addresses alone.
    """

    __slots__ = ("buffer", "here", "is_file", "key", "nbytes")

    def __init__(self, key: int, fd: int, nbytes: int, is_file: bool = False, here: range | None = None):
        self.key = key
        self.nbytes = nbytes
        self.is_file = is_file
        self.here = range(nbytes) if here is None else here
        self.buffer = map_file(fd, nbytes, is_file)

    def array(self, shape: tuple[int, ...], dtype: npt.DTypeLike, offset: int = 0) -> np.ndarray:
        """Return a view of the segment's memory as an array."""
        return np.ndarray(shape, dtype, cast(Any, self.buffer), offset)


class Unmapped:
    """A segment that this process had no room for when it came: whoever needs it tries again, or gets the error."""

    def __init__(self, key: int, file: io.FileIO | None, nbytes: int, is_file: bool):
        self.key = key
        self._file = file
        self._nbytes = nbytes
        self._is_file = is_file

    def map(self) -> Segment:
        """Return the segment."""
        if self._file is None:
            raise OSError(
                errno.EMFILE,
                f"{self._nbytes:,} bytes of shared memory could not be received: too many open files (see `ulimit -n`)",
            )
        return Segment(self.key, self._file.fileno(), self._nbytes, self._is_file)


class SharedArray(NamedTuple):  # a tuple, because these are pickled with every call
    """Where an array lies in shared memory."""

    key: int
    dtype: str
    shape: tuple[int, ...]
    offset: int = 0

    def view(self, segments: SegmentTable) -> np.ndarray:
        """Return the array itself, as a view of this rank's mapping."""
        return segments[self.key].array(self.shape, self.dtype, self.offset)

    def rows_of(self, size: int, ranks: range) -> range | None:
        """Return the rows that a host with these of ``size`` ranks has and no other; None if hosts are sent any."""
        return None

    def part(self, start: int, stop: int) -> SharedArray:
        """Return where a run of a vector's items lies."""
        return SharedArray(self.key, self.dtype, (stop - start,), self.offset + start * np.dtype(self.dtype).itemsize)


class SegmentTable:
    """The segments that a rank has mapped, by key; the same keys on every rank."""

    def __init__(self) -> None:
        #: Called with a segment before it is forgotten: what a device knows of the memory goes before the memory.
        self.at_drop: list[Callable[[Segment], None]] = []
        self._segments: dict[int, Segment] = {}
        self._unmapped: dict[int, Unmapped] = {}

    def __getitem__(self, key: int) -> Segment:
        segment = self._segments.get(key)
        if segment is None:
            segment = self._segments[key] = self._unmapped[key].map()
            del self._unmapped[key]
        return segment

    def __len__(self) -> int:
        return len(self._segments) + len(self._unmapped)

    def add(self, segment: Segment | Unmapped) -> None:
        """Enter a segment."""
        if isinstance(segment, Segment):
            self._segments[segment.key] = segment
        else:
            self._unmapped[segment.key] = segment

    def drop(self, key: int) -> weakref.ref[mmap.mmap] | None:
        """Forget a segment, and return a reference to its memory, which goes with the last view of it."""
        segment = self._segments.get(key)
        if segment is not None:
            for tell in self.at_drop:
                tell(segment)
        self._segments.pop(key, None)
        self._unmapped.pop(key, None)
        return None if segment is None else weakref.ref(segment.buffer)

    def clear(self) -> None:
        """Forget all segments."""
        for key in list(self._segments):
            self.drop(key)
        self._unmapped.clear()


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mmap.restype = ctypes.c_void_p
_FAILED = ctypes.c_void_p(-1).value
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000


def map_file(fd: int, nbytes: int, private: bool = False) -> mmap.mmap:
    """Map shared memory, until the last reference to what is returned has gone; ``private`` for a copy when written.

    Python's own mapping of a file holds a file descriptor, of which a process may have a thousand or so.  So Python
    maps as much anonymous memory, and the file takes its place.  No finalizer written in Python does the unmapping: an
    interrupt in the middle of one is swallowed, and the memory stays.
    """
    error = 0
    try:
        memory = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    except OSError as caught:
        error = caught.errno or errno.ENOMEM
    else:
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, _MAP_FIXED
        flags |= mmap.MAP_PRIVATE | _MAP_NORESERVE if private else mmap.MAP_SHARED
        if _libc.mmap(address, nbytes, protection, flags, fd, 0) == _FAILED:
            error = ctypes.get_errno()
    if error:
        raise MemoryError(
            f"{nbytes:,} bytes of shared memory can't be mapped: {os.strerror(error)}; see `ulimit -v`, and "
            "`sysctl vm.max_map_count` for how many Data objects there may be"
        )
    return memory


def announce(channel: socket.socket, segment: Segment, fd: int) -> None:
    """Send a segment to the worker at the other end of ``channel``; to one that has died, nothing."""
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", fd))
    # Whoever waits for the worker next notices its death, and can say more of it than this.  And the user may have
    # given SIGPIPE its deadly meaning back.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        message = _ANNOUNCEMENT.pack(segment.key, segment.nbytes, segment.is_file)
        channel.sendmsg([message], [rights], socket.MSG_NOSIGNAL)


def is_closed(channel: socket.socket) -> bool:
    """Whether the process at the other end has ended."""
    try:
        return not channel.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


class Receiver:
    """The worker's end of the channel.

    It keeps a file descriptor in reserve, so that segments come in even where the user's code has used up all others.

    Attributes
    ----------
    path : str
        Of the last user's file that came.
    """

    path = ""

    def __init__(self, channel: socket.socket):
        self._channel = channel
        self._reserve: io.FileIO | None = None
        self._keep_reserve()

    def receive(self) -> Segment | Unmapped:
        """Receive the next announced segment, and map it if there is room."""
        if self._reserve is not None:
            self._reserve.close()
        try:
            message, fds, _, _ = socket.recv_fds(self._channel, _ANNOUNCEMENT.size, 1)
            if not message:
                raise EOFError("the master closed the channel")
            key, nbytes, is_file = _ANNOUNCEMENT.unpack(message)
            if not fds:
                return Unmapped(key, None, nbytes, is_file)
            file = io.FileIO(fds[0], "r+")
            if is_file:
                self.path = os.readlink(f"/proc/self/fd/{fds[0]}")
            try:
                segment = Segment(key, file.fileno(), nbytes, is_file)
            except MemoryError:
                return Unmapped(key, file, nbytes, is_file)
            file.close()
            return segment
        finally:
            self._keep_reserve()

    def _keep_reserve(self) -> None:
        try:
            self._reserve = io.FileIO(os.devnull)
        except OSError:
            self._reserve = None
