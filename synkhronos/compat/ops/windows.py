"""Windows of an array as columns (im2col), and the transposed operation (col2im).

A *window* is a part of an array, with a *position* for each of its elements.  There is a window for each element of the
output.  On one axis, with windows of 3 elements and a stride of 2::

    array       a b c d e f g
    window 0    a b c
    window 1        c d e
    window 2            e f g       the elements at position 1 of all windows: b d f, array[1:6:2]

Loops run over the few positions, never over the windows.  Names ending in ``lengths`` are the lengths of the spatial
axes: of the array, of a window, or of the output.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.tensor.exceptions import NotScalarConstantError


def to_window_parameter(value: Any) -> int:
    """Convert a length, stride, padding or dilation, a number or a constant variable, to an integer."""
    try:
        return int(pt.get_scalar_constant_value(value))
    except NotScalarConstantError:
        raise TypeError(f"windows, strides, paddings and dilations: expected integers, got {value}") from None


def iterate_positions(
    window_lengths: Sequence[int], output_lengths: Sequence[int], strides: Sequence[int], dilations: Sequence[int]
) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...]]]:
    """Yield each position in a window, and the slices of the array that select its elements in all windows."""
    for position in itertools.product(*map(range, window_lengths)):
        starts = [p * d for p, d in zip(position, dilations, strict=True)]
        axes = zip(starts, output_lengths, strides, strict=True)
        yield position, tuple(slice(start, start + (n - 1) * stride + 1, stride) for start, n, stride in axes)


def unfold(
    array: np.ndarray,
    window_lengths: Sequence[int],
    output_lengths: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
) -> np.ndarray:
    """Return the windows of an array (batch, channels, *array lengths) as columns.

    The columns have the shape (batch, channels, *window lengths, *output lengths).
    """
    columns: Any = np.empty((*array.shape[:2], *window_lengths, *output_lengths), array.dtype)
    for position, elements in iterate_positions(window_lengths, output_lengths, strides, dilations):
        columns[(slice(None), slice(None), *position)] = array[(slice(None), slice(None), *elements)]
    return columns


def fold(columns: Any, array_lengths: Sequence[int], strides: Sequence[int], dilations: Sequence[int]) -> np.ndarray:
    """Return the array (batch, channels, *array lengths) that is the sum of windows, each at its place.

    The columns have the shape of the result of `unfold`, whose transposed operation this is.
    """
    n = len(array_lengths)
    array: Any = np.zeros((*columns.shape[:2], *array_lengths), columns.dtype)
    for position, elements in iterate_positions(columns.shape[2 : 2 + n], columns.shape[2 + n :], strides, dilations):
        array[(slice(None), slice(None), *elements)] += columns[(slice(None), slice(None), *position)]
    return array


def pad_zeros(array: Any, padding_before: Sequence[int], padded_lengths: Sequence[int]) -> Any:
    """Return a JAX array with its last axes padded by zeros: by ``padding_before``, and after it to ``padded_lengths``.

    A negative padding after the array removes elements.
    """
    from jax import lax

    n_leading = array.ndim - len(padded_lengths)
    axes = zip(padding_before, padded_lengths, array.shape[n_leading:], strict=True)
    padding = [(before, total - before - length, 0) for before, total, length in axes]
    return lax.pad(array, np.zeros((), array.dtype), [(0, 0, 0)] * n_leading + padding)
