"""Table of the pages of shared memory that other hosts have; missing and changed pages are sent.

Users write into shared memory by any means of NumPy, and such writes can't be detected.  The pages that a command reads
are therefore compared with a copy of the last sent pages, and changed pages are sent again.  No write is missed, and
unchanged pages are sent once.  The costs are the copy, on the master's host, and the comparison in each command.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from synkhronos.ranks import ArrayLocation, RowAccess, Segment

#: Number of bytes of a page, the unit in which memory is compared and sent.
PAGE_NBYTES = 4096
#: Number of pages compared at a time.
_PAGES_PER_COMPARISON = 1024


class PageTable:
    """Pages of each segment that each other host has; in the agent of the master's host.

    ``keep_alive`` is called repeatedly during long comparisons, to send heartbeats.  ``memory`` has the segments of
    this host, each as an array of pages of bytes, by key.
    """

    def __init__(self, n_hosts: int, keep_alive: Callable[[], object]):
        self._n_hosts = n_hosts
        self._keep_alive = keep_alive
        self.memory: dict[int, np.ndarray] = {}
        self._sent_copies: dict[int, np.ndarray] = {}
        self._held_pages: dict[int, np.ndarray] = {}

    def add(self, key: int, memory: np.ndarray) -> None:
        """Add a segment, an array of pages; no other host has any page of it yet."""
        self.memory[key] = memory
        # Only sent pages are written into the copy, and the kernel allocates only pages that are written.
        self._sent_copies[key] = np.empty(memory.shape, np.uint8)
        self._held_pages[key] = np.zeros((self._n_hosts, len(memory)), bool)

    def drop(self, keys: Iterable[int]) -> None:
        """Remove segments."""
        for key in keys:
            for table in (self.memory, self._sent_copies, self._held_pages):
                table.pop(key, None)

    def pop_missing_pages(self, needed: Sequence[dict[int, np.ndarray]]) -> list[dict[int, np.ndarray]]:
        """Return the pages that each host needs and does not have, by segment, and record them as sent.

        ``needed`` has the sorted numbers of the pages that each host needs, by segment.
        """
        for key in set().union(*needed):
            pages = np.unique(
                np.concatenate([pages_by_segment[key] for pages_by_segment in needed if key in pages_by_segment])
            )
            for start in range(0, len(pages), _PAGES_PER_COMPARISON):
                self._update_copies(key, pages[start : start + _PAGES_PER_COMPARISON])
                self._keep_alive()
        missing_by_host: list[dict[int, np.ndarray]] = []
        for host, pages_by_segment in enumerate(needed):
            missing_by_host.append({})
            for key, pages in pages_by_segment.items():
                held = self._held_pages[key][host]
                missing = pages[~held[pages]]
                if missing.size:
                    missing_by_host[-1][key] = missing
                    held[missing] = True
        return missing_by_host

    def _update_copies(self, key: int, pages: np.ndarray) -> None:
        """Mark changed pages as missing on all hosts, and copy the pages that no host has."""
        memory, sent_copy, held = self.memory[key], self._sent_copies[key], self._held_pages[key]
        sent_pages = pages[held[:, pages].any(axis=0)]
        present, sent = (np.take(array, sent_pages, axis=0).view(np.uint64) for array in (memory, sent_copy))
        held[:, sent_pages[(present != sent).any(axis=1)]] = False
        new_pages = pages[~held[:, pages].any(axis=0)]
        sent_copy[new_pages] = memory[new_pages]


def view_pages(segment: Segment) -> np.ndarray:
    """Return the memory of a segment as an array of pages."""
    return np.frombuffer(segment.buffer, np.uint8).reshape(-1, PAGE_NBYTES)


def find_pages(accesses: Iterable[RowAccess], memory: dict[int, np.ndarray]) -> dict[int, np.ndarray]:
    """Return the sorted numbers of the accessed pages, by segment.  Row indexes are read from ``memory``."""
    pages_by_segment: dict[int, list[np.ndarray]] = {}
    for array, rows, first_row in accesses:
        itemsize = np.dtype(array.dtype).itemsize
        row_nbytes = math.prod(array.shape[1:]) * itemsize
        if rows is None or not array.shape:
            pages = _find_page_range(array.offset, array.offset + math.prod(array.shape) * itemsize)
        elif isinstance(rows, ArrayLocation):
            start, stop = rows.offset, rows.offset + 8 * rows.shape[0]
            pages_by_segment.setdefault(rows.segment_key, []).append(_find_page_range(start, stop))
            index = memory[rows.segment_key].reshape(-1)[start:stop].view(np.int64) - first_row
            pages = _find_row_pages(array.offset, row_nbytes, index)
        elif rows and abs(rows.step) == 1:
            low, high = sorted((rows[0] - first_row, rows[-1] - first_row))  # min() would iterate over the range
            pages = _find_page_range(array.offset + low * row_nbytes, array.offset + (high + 1) * row_nbytes)
        else:
            index = np.arange(rows.start, rows.stop, rows.step) - first_row
            pages = _find_row_pages(array.offset, row_nbytes, index)
        pages_by_segment.setdefault(array.segment_key, []).append(pages)
    # A segment that is not in ``memory`` is a user's file, which every host has.
    return {key: np.unique(np.concatenate(pages)) for key, pages in pages_by_segment.items() if key in memory}


def _find_page_range(start: int, stop: int) -> np.ndarray:
    """Return the numbers of the pages that a range of bytes overlaps."""
    return np.arange(start // PAGE_NBYTES, -(-stop // PAGE_NBYTES)) if stop > start else np.arange(0)


def _find_row_pages(offset: int, row_nbytes: int, index: np.ndarray) -> np.ndarray:
    """Return the numbers of the pages that rows of an array at byte ``offset`` overlap, with repetitions."""
    if not index.size or not row_nbytes:
        return np.arange(0)
    first_pages = (offset + index * row_nbytes) // PAGE_NBYTES
    last_pages = (offset + (index + 1) * row_nbytes - 1) // PAGE_NBYTES
    max_pages_per_row = int((last_pages - first_pages).max()) + 1
    return np.minimum(first_pages[:, None] + np.arange(max_pages_per_row), last_pages[:, None]).reshape(-1)
