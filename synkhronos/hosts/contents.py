"""Which parts of shared memory the other hosts lack.

`Contents`
    Keeps account, in the agent of the master's host.
`pages_of`
    The pages that a command's reads touch on a host.
`take_pages`, `put_pages`
    Copy pages out of memory, and into it.

The user writes into shared memory in every way that NumPy has, and nobody is told.  So what a command reads is
compared with what was sent last, page by page, and what differs is sent again: no write is missed, and nothing is sent
twice while it stays the same.  The price is a second copy, on the master's host, of what other hosts were sent, and a
comparison of what they read in each command.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

#: Bytes of a page, the unit in which memory is compared and sent.
PAGE = 4096
#: Pages that are compared at once.
_RUN = 1024


class Rows(NamedTuple):
    """What a host reads of a segment, as the master's plan says it."""

    #: The segment's.
    key: int
    #: The byte at which row 0 begins.
    at: int
    #: Bytes of a row.
    row: int
    #: ``(start, stop, step)``; None for indexes.
    rows: tuple[int, int, int] | None
    #: ``(key, at, count, base)``: so many int64 from a byte of another segment on, each less ``base``.
    indexes: tuple[int, int, int, int] | None


class Contents:
    """What each other host, of so many, has of each segment.

    ``go_on`` is called now and then in long comparisons.
    """

    def __init__(self, n_hosts: int, go_on: Callable[[], object] = bool):
        self._n_hosts = n_hosts
        self._go_on = go_on
        #: The segments of this host as bytes, by key.
        self.memory: dict[int, np.ndarray] = {}
        self._last: dict[int, np.ndarray] = {}
        self._has: dict[int, np.ndarray] = {}

    def add(self, key: int, memory: np.ndarray) -> None:
        """Enter a segment, of which no other host has anything yet."""
        self.memory[key] = memory
        # Memory that is never touched costs nothing: only pages that are sent are written here.
        self._last[key] = np.empty(memory.size, np.uint8)
        self._has[key] = np.zeros((self._n_hosts, -(-memory.size // PAGE)), bool)

    def drop(self, keys: Iterable[int]) -> None:
        """Forget segments."""
        for key in keys:
            for table in (self.memory, self._last, self._has):
                table.pop(key, None)

    def lacking(self, needed: Sequence[dict[int, np.ndarray]]) -> list[dict[int, np.ndarray]]:
        """Return which of the pages that each host needs it lacks, by segment, and note them as sent.

        ``needed`` has for each host the sorted pages, by segment.
        """
        for key in set().union(*needed):
            pages = np.unique(np.concatenate([of_host[key] for of_host in needed if key in of_host]))
            for at in range(0, len(pages), _RUN):
                self._compare(key, pages[at : at + _RUN])
                self._go_on()
        lacking: list[dict[int, np.ndarray]] = []
        for host, of_host in enumerate(needed):
            lacking.append({})
            for key, pages in of_host.items():
                has = self._has[key][host]
                missing = pages[~has[pages]]
                if missing.size:
                    lacking[-1][key] = missing
                    has[missing] = True
        return lacking

    def _compare(self, key: int, pages: np.ndarray) -> None:
        """Note which pages have changed since they were sent, and keep a copy of those that are sent now."""
        memory, last, has = self.memory[key], self._last[key], self._has[key]
        known = pages[has[:, pages].any(axis=0)]
        has[:, known[_differ(take_pages(memory, known), take_pages(last, known))]] = False
        new = pages[~has[:, pages].any(axis=0)]
        put_pages(last, new, take_pages(memory, new))


def _differ(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return for each page of two runs of bytes whether they differ in it; the last may be shorter than a page."""
    n_whole = one.size // PAGE
    whole = slice(n_whole * PAGE)
    first, second = (each[whole].view(np.uint64).reshape(n_whole, PAGE // 8) for each in (one, other))
    differ = (first != second).any(axis=1)
    if one.size % PAGE:
        differ = np.append(differ, not np.array_equal(one[n_whole * PAGE :], other[n_whole * PAGE :]))
    return differ


def pages_of(reads: Iterable[Rows], memory: dict[int, np.ndarray]) -> dict[int, np.ndarray]:
    """Return the sorted pages of each segment in which what is read lies; indexes are looked up in ``memory``."""
    found: dict[int, list[np.ndarray]] = {}
    for read in reads:
        if read.indexes is not None:
            key, at, count, base = read.indexes
            found.setdefault(key, []).append(_run(at, at + 8 * count))
            index = memory[key][at : at + 8 * count].view(np.int64) - base
            found.setdefault(read.key, []).append(_of_rows(read, index))
        elif read.rows is not None:
            rows = range(*read.rows)
            if rows and abs(rows.step) == 1:
                low, high = sorted((rows[0], rows[-1]))  # min() would go through all of them
                pages = _run(read.at + low * read.row, read.at + (high + 1) * read.row)
            else:
                pages = _of_rows(read, np.arange(*read.rows))
            found.setdefault(read.key, []).append(pages)
    # A segment that is not in `memory` is a file, which each host has.
    return {key: np.unique(np.concatenate(parts)) for key, parts in found.items() if key in memory}


def _run(start: int, stop: int) -> np.ndarray:
    """Return the pages of a run of bytes."""
    return np.arange(start // PAGE, -(-stop // PAGE)) if stop > start else np.arange(0)


def _of_rows(read: Rows, index: np.ndarray) -> np.ndarray:
    """Return the pages of rows."""
    if not index.size or not read.row:
        return np.arange(0)
    first = (read.at + index * read.row) // PAGE
    last = (read.at + (index + 1) * read.row - 1) // PAGE
    most = int((last - first).max()) + 1
    return np.minimum(first[:, None] + np.arange(most), last[:, None]).reshape(-1)


def take_pages(memory: np.ndarray, pages: np.ndarray) -> np.ndarray:
    """Return pages of memory, one after the other, as bytes; the last of the memory may be shorter."""
    if not pages.size:
        return np.empty(0, np.uint8)
    n_whole = memory.size // PAGE
    whole = memory[: n_whole * PAGE].reshape(n_whole, PAGE)
    if pages[-1] < n_whole:
        return np.take(whole, pages, axis=0).reshape(-1)
    return np.concatenate([np.take(whole, pages[:-1], axis=0).reshape(-1), memory[n_whole * PAGE :]])


def put_pages(memory: np.ndarray, pages: np.ndarray, content: np.ndarray) -> None:
    """Write pages, as `take_pages` returned them, into memory."""
    if not pages.size:
        return
    n_whole = memory.size // PAGE
    whole = memory[: n_whole * PAGE].reshape(n_whole, PAGE)
    n = pages.size if pages[-1] < n_whole else pages.size - 1
    whole[pages[:n]] = content[: n * PAGE].reshape(n, PAGE)
    if n < pages.size:
        memory[n_whole * PAGE :] = content[n * PAGE :]
