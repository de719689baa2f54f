"""The parts of a pickle in shared memory: the pickled objects, then their arrays, which readers need not copy.

::

    number of parts, length of each │ pickle │ array │ array ...        each part is aligned
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

#: Alignment of each part, in bytes.
_ALIGNMENT = 64
_WORD = 8


def measure_parts(parts: Sequence[memoryview]) -> int:
    """Return the number of bytes that parts take in shared memory, with their index; there is at least one part."""
    return _locate(map(len, parts))[-1].stop


def write_parts(parts: Sequence[memoryview], memory: memoryview) -> None:
    """Write parts, and their index, into memory of the length that `measure_parts` returns."""
    struct.pack_into(f"={1 + len(parts)}Q", memory, 0, len(parts), *map(len, parts))
    for part, span in zip(parts, _locate(map(len, parts)), strict=True):
        memory[span.start : span.stop] = part


def read_parts(memory: memoryview) -> list[memoryview]:
    """Return views of the parts that `write_parts` wrote."""
    (count,) = struct.unpack_from("=Q", memory)
    lengths = struct.unpack_from(f"={count}Q", memory, _WORD)
    return [memory[span.start : span.stop] for span in _locate(lengths)]


def _locate(lengths: Iterable[int]) -> list[range]:
    """Return the bytes of each part."""
    lengths = list(lengths)
    spans, end = [], _WORD * (1 + len(lengths))
    for length in lengths:
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        end = start + length
        spans.append(range(start, end))
    return spans
