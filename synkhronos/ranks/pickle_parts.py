"""Layout of a pickle and its out-of-band arrays in shared memory, where readers need not copy the arrays.

::

    number of parts, their lengths │ pickle │ array │ array ...        each part is aligned
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

#: Alignment of each part, in bytes.
_ALIGNMENT = 64
_WORD = 8


def measure_parts(parts: Sequence[memoryview]) -> int:
    """Return the number of bytes that parts take in shared memory, index included; there is at least one part."""
    return _compute_ranges(map(len, parts))[-1].stop


def write_parts(parts: Sequence[memoryview], memory: memoryview) -> None:
    """Write the index and the parts into memory, of the length that `measure_parts` returns."""
    struct.pack_into(f"={1 + len(parts)}Q", memory, 0, len(parts), *map(len, parts))
    for part, span in zip(parts, _compute_ranges(map(len, parts)), strict=True):
        memory[span.start : span.stop] = part


def read_parts(memory: memoryview) -> list[memoryview]:
    """Return views of the parts that `write_parts` wrote."""
    (count,) = struct.unpack_from("=Q", memory)
    lengths = struct.unpack_from(f"={count}Q", memory, _WORD)
    return [memory[span.start : span.stop] for span in _compute_ranges(lengths)]


def _compute_ranges(lengths: Iterable[int]) -> list[range]:
    """Return the range of bytes of each part."""
    lengths = list(lengths)
    spans, end = [], _WORD * (1 + len(lengths))
    for length in lengths:
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        end = start + length
        spans.append(range(start, end))
    return spans
