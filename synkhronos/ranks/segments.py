"""Shared memory that all ranks map.

The master creates a segment as a file in memory.  As the file has no name, no crash leaves the memory behind, and no
other process can open it.  Workers receive the open file over the socket pairs that they inherited at the fork.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import io
import mmap
import os
import resource
import socket
import struct
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from synkhronos.ranks.interrupts import defer_signals

#: Message that accompanies a segment's file: key, number of bytes, whether it is a user's file.
_SEGMENT_HEADER = struct.Struct("=QQ?")
#: Minimal number of bytes of shared memory that `check_free_memory` checks.
_MIN_CHECKED_NBYTES = 64 << 20
#: Advice in errors that report a lack of shared memory.
_MEMORY_ADVICE = "delete Data objects that are no longer needed, or give the container or job more memory"
#: Seconds for which `send_segment` tries again while this user's processes have sent each other too many files.
_SEND_SECONDS = 5.0
#: Fraction of the free memory that is left to other programs.
_RESERVED_FRACTION = 1 / 16


def check_free_memory(nbytes: int) -> None:
    """Raise MemoryError if the machine has fewer bytes free.

    The kernel would not refuse an allocation that is too large, but kill processes later.
    """
    if nbytes >= _MIN_CHECKED_NBYTES and nbytes > (free := int(get_free_memory() * (1 - _RESERVED_FRACTION))):
        raise MemoryError(
            f"not enough memory for {nbytes:,} bytes of shared memory, {free:,} bytes are free: {_MEMORY_ADVICE}"
        )


def get_free_memory(root: str = "") -> int:
    """Return the number of bytes that this process can still allocate, within the limits of its control groups."""
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


def create_unlinked_file(nbytes: int, allocated_ranges: Iterable[range] | None = None) -> io.FileIO:
    """Create shared memory as a file without a name, and return the open file.

    The pages of ``allocated_ranges``, by default of all bytes, are allocated now: MemoryError is raised if memory is
    short, or a limit of this process is exceeded.
    """
    allocated_ranges = [range(nbytes)] if allocated_ranges is None else [span for span in allocated_ranges if span]
    n_allocated = sum(span.stop - span.start for span in allocated_ranges)  # len() of a range has a limit
    largest = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if nbytes > largest != resource.RLIM_INFINITY:
        raise MemoryError(
            f"can't create {nbytes:,} bytes of shared memory: this process may not create files of more than "
            f"{largest:,} bytes, see `ulimit -f`"
        )
    check_free_memory(n_allocated)
    with defer_signals():
        file = io.FileIO(os.memfd_create("synkhronos"), "r+")  # closed with its last reference
        os.fchmod(file.fileno(), 0o600)
    try:
        os.ftruncate(file.fileno(), nbytes)
        for span in allocated_ranges:
            os.posix_fallocate(file.fileno(), span.start, len(span))
    except (OSError, OverflowError) as error:  # OverflowError: more than an off_t holds
        file.close()
        if isinstance(error, OverflowError) or error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            raise MemoryError(
                f"not enough memory for {n_allocated:,} bytes of shared memory: {_MEMORY_ADVICE}"
            ) from error
        raise
    return file


class Segment:
    """Shared memory, or a user's file, mapped into this process; its key is the same on every rank.

    The memory is freed when every process has unmapped it.  A process unmaps it when the last NumPy view is deleted, so
    dropping a segment never invalidates an array.  A user's file is mapped copy-on-write: it does not change.  Bytes
    outside of ``allocated_bytes`` (default: all) are only addresses.
    """

    __slots__ = ("buffer", "allocated_bytes", "file_id", "is_user_file", "key", "nbytes", "path")

    def __init__(
        self, key: int, fd: int, nbytes: int, is_user_file: bool = False, allocated_bytes: range | None = None
    ):
        self.key = key
        self.nbytes = nbytes
        self.is_user_file = is_user_file
        self.allocated_bytes = range(nbytes) if allocated_bytes is None else allocated_bytes
        self.path = os.readlink(f"/proc/self/fd/{fd}") if is_user_file else ""
        self.file_id = _get_file_id(fd) if is_user_file else None
        self.buffer = map_file(fd, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE, is_user_file)

    def view_array(self, shape: tuple[int, ...], dtype: npt.DTypeLike, offset: int = 0) -> np.ndarray:
        """Return an array view of the segment's memory from byte ``offset`` on."""
        return np.ndarray(shape, dtype, self.buffer, offset)


def _get_file_id(fd: int) -> tuple[int, int]:
    """Return the device and inode of a file."""
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


class UnmappedSegment(NamedTuple):
    """A segment that could not be mapped when it was received.  `map` tries again."""

    key: int
    file: io.FileIO | None
    nbytes: int
    is_user_file: bool

    def map(self) -> Segment:
        """Map the segment.  Raise OSError if it can't be mapped."""
        if self.file is None:
            raise OSError(
                errno.EMFILE,
                f"{self.nbytes:,} bytes of shared memory could not be received: too many open files (see `ulimit -n`)",
            )
        return Segment(self.key, self.file.fileno(), self.nbytes, self.is_user_file)


class ArrayLocation(NamedTuple):  # a tuple, because it is pickled with every call
    """Location of an array, from a byte offset of a segment; commands contain it in place of the array."""

    segment_key: int
    dtype: str
    shape: tuple[int, ...]
    offset: int = 0

    def view(self, segments: SegmentTable) -> np.ndarray:
        """Return the array, as a view of the segment that this rank has mapped."""
        return segments[self.segment_key].view_array(self.shape, self.dtype, self.offset)

    def find_local_rows(self, size: int, host_ranks: range) -> range | None:
        """Return the rows that only the host of these ranks has, or None if the master's host has all rows."""
        return None

    def slice_items(self, start: int, stop: int) -> ArrayLocation:
        """Return the location of the items ``start:stop`` of a vector."""
        return ArrayLocation(
            self.segment_key, self.dtype, (stop - start,), self.offset + start * np.dtype(self.dtype).itemsize
        )


class SegmentTable:
    """Segments that a rank has mapped, by key; the keys are the same on every rank.

    ``before_unmap_callbacks`` are called with a segment before its memory is unmapped or mapped anew, so that a device
    unlocks its pages.
    """

    def __init__(self) -> None:
        self.before_unmap_callbacks: list[Callable[[Segment], None]] = []
        self._segments: dict[int, Segment] = {}
        self._unmapped: dict[int, UnmappedSegment] = {}

    def __getitem__(self, key: int) -> Segment:
        segment = self._segments.get(key)
        if segment is None:
            segment = self._segments[key] = self._unmapped[key].map()
            del self._unmapped[key]
        return segment

    def __len__(self) -> int:
        return len(self._segments) + len(self._unmapped)

    def add(self, segment: Segment | UnmappedSegment) -> None:
        """Add a segment."""
        if isinstance(segment, Segment):
            self._segments[segment.key] = segment
        else:
            self._unmapped[segment.key] = segment

    def reopen_files(self) -> Iterator[tuple[Segment, io.FileIO]]:
        """Reopen the file of each segment, or copy its memory to a new file.  Yield segments and open files by key.

        New processes can't map the old file, as its descriptor is closed.  Views of the memory stay valid.  MemoryError
        is raised if there is not enough memory for a copy, and OSError if a user's file has been replaced.
        """
        for key in sorted(self._segments):
            segment = self._segments[key]
            if segment.allocated_bytes and len(segment.allocated_bytes) < segment.nbytes:
                continue  # other hosts' part of it is lost with their ranks
            if segment.is_user_file:
                file = io.FileIO(segment.path)
                is_same_file = _get_file_id(file.fileno()) == segment.file_id
                if not is_same_file or os.fstat(file.fileno()).st_size != segment.nbytes:
                    raise OSError(errno.ESTALE, f"{segment.path} has changed since it was mapped")
                yield segment, file
                continue
            for callback in self.before_unmap_callbacks:
                callback(segment)
            file = create_unlinked_file(segment.nbytes)
            content, done = memoryview(segment.buffer).cast("B"), 0
            while done < segment.nbytes:
                done += os.pwrite(file.fileno(), content[done : done + (1 << 30)], done)
            if error := _map_over(segment.buffer, file.fileno(), segment.nbytes, copy_on_write=False):
                raise MemoryError(f"{segment.nbytes:,} bytes of shared memory can't be mapped: {os.strerror(error)}")
            yield segment, file

    def drop(self, key: int) -> weakref.ref[mmap.mmap] | None:
        """Drop a segment and return a weak reference to its memory, which is freed with its last view."""
        segment = self._segments.get(key)
        if segment is not None:
            for callback in self.before_unmap_callbacks:
                callback(segment)
        self._segments.pop(key, None)
        self._unmapped.pop(key, None)
        return None if segment is None else weakref.ref(segment.buffer)

    def copy(self) -> SegmentTable:
        """Return a table of the same segments, without callbacks."""
        table = SegmentTable()
        table._segments, table._unmapped = dict(self._segments), dict(self._unmapped)
        return table

    def clear(self) -> None:
        """Drop all segments."""
        for key in list(self._segments):
            self.drop(key)
        self._unmapped.clear()


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mmap.restype = ctypes.c_void_p
_MAP_FAILED = ctypes.c_void_p(-1).value
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000


def map_file(fd: int, nbytes: int, copy_on_write: bool = False) -> mmap.mmap:
    """Map a file into memory without keeping a file descriptor.

    Python's mmap of a file duplicates the file descriptor, and a process may have only about a thousand.  Therefore
    anonymous memory is mapped with Python, and the file is mapped over it.  The destructor of `mmap.mmap` unmaps the
    memory.  A finalizer in Python could be interrupted, and leak the memory.
    """
    error = 0
    try:
        memory = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    except OSError as caught:
        error = caught.errno or errno.ENOMEM
    else:
        error = _map_over(memory, fd, nbytes, copy_on_write)
    if error:
        raise MemoryError(
            f"{nbytes:,} bytes of shared memory can't be mapped: {os.strerror(error)}; see `ulimit -v`, and "
            "`sysctl vm.max_map_count`, which limits the number of Data objects"
        )
    return memory


def _map_over(memory: mmap.mmap, fd: int, nbytes: int, copy_on_write: bool) -> int:
    """Map a file over mapped memory, at its address.  Return an error number, or 0."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, _MAP_FIXED
    flags |= mmap.MAP_PRIVATE | _MAP_NORESERVE if copy_on_write else mmap.MAP_SHARED
    return ctypes.get_errno() if _libc.mmap(address, nbytes, protection, flags, fd, 0) == _MAP_FAILED else 0


def send_segment(channel: socket.socket, segment: Segment, fd: int) -> None:
    """Send a segment to the worker at the other end of ``channel``.  Do nothing if the worker has died."""
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", fd))
    message = _SEGMENT_HEADER.pack(segment.key, segment.nbytes, segment.is_user_file)
    deadline = time.monotonic() + _SEND_SECONDS
    # The next wait for the worker reports its death with its exit status.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        while True:
            try:
                # MSG_NOSIGNAL: the user may have restored SIGPIPE's default action.
                channel.sendmsg([message], [rights], socket.MSG_NOSIGNAL)
                return
            except OSError as error:
                # Other programs of this user have sent files, too, and soon receive them.
                if error.errno != errno.ETOOMANYREFS or time.monotonic() > deadline:
                    raise
            time.sleep(0.001)


def is_peer_closed(channel: socket.socket) -> bool:
    """Whether the process at the other end of a channel has exited."""
    try:
        return not channel.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def get_peer_ids(channel: socket.socket) -> tuple[int, int]:
    """Return the ids of the process at the other end of a Unix socket and of its user."""
    pid, user, _ = struct.unpack("3i", channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, user


class SegmentReceiver:
    """A worker's end of the channel over which segments arrive.

    The receiver reserves a file descriptor, so that it works even after the user's code has used up all others.
    """

    def __init__(self, channel: socket.socket):
        self._channel = channel
        self._reserved_file: io.FileIO | None = None
        self._reserve_descriptor()

    def receive(self) -> Segment | UnmappedSegment:
        """Receive the next segment and map it.  Return `UnmappedSegment` if it cannot be mapped now."""
        if self._reserved_file is not None:
            self._reserved_file.close()
        try:
            message, fds, _, _ = socket.recv_fds(self._channel, _SEGMENT_HEADER.size, 1)
            if not message:
                raise EOFError("the master closed the channel")
            key, nbytes, is_user_file = _SEGMENT_HEADER.unpack(message)
            if not fds:
                return UnmappedSegment(key, None, nbytes, is_user_file)
            file = io.FileIO(fds[0], "r+")
            try:
                segment = Segment(key, file.fileno(), nbytes, is_user_file)
            except MemoryError:
                return UnmappedSegment(key, file, nbytes, is_user_file)
            file.close()
            return segment
        finally:
            self._reserve_descriptor()

    def _reserve_descriptor(self) -> None:
        try:
            self._reserved_file = io.FileIO(os.devnull)
        except OSError:
            self._reserved_file = None
