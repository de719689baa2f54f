"""Layout of a pickle and its out-of-band arrays in shared memory, where readers need not copy the arrays.

::

    number of buffers, their lengths │ pickle │ array │ array ...      each buffer is aligned
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

#: Alignment of each buffer, in bytes.
_ALIGNMENT = 64
_WORD_NBYTES = 8


def measure_buffers(buffers: Sequence[bytes | memoryview]) -> int:
    """Return the number of bytes that buffers take in shared memory, index included; there is at least one buffer."""
    return _compute_ranges(map(len, buffers))[-1].stop


def write_buffers(buffers: Sequence[bytes | memoryview], memory: memoryview) -> None:
    """Write the index and the buffers into memory, of the length that `measure_buffers` returns."""
    struct.pack_into(f"={1 + len(buffers)}Q", memory, 0, len(buffers), *map(len, buffers))
    for buffer, span in zip(buffers, _compute_ranges(map(len, buffers)), strict=True):
        memory[span.start : span.stop] = buffer


def read_buffers(memory: memoryview) -> list[memoryview]:
    """Return views of the buffers that `write_buffers` wrote."""
    (count,) = struct.unpack_from("=Q", memory)
    lengths = struct.unpack_from(f"={count}Q", memory, _WORD_NBYTES)
    return [memory[span.start : span.stop] for span in _compute_ranges(lengths)]


def _compute_ranges(lengths: Iterable[int]) -> list[range]:
    """Return the range of bytes of each buffer."""
    lengths = list(lengths)
    spans, end = [], _WORD_NBYTES * (1 + len(lengths))
    for length in lengths:
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        end = start + length
        spans.append(range(start, end))
    return spans
