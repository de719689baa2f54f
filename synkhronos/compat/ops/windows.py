"""Windows of an array as columns (im2col), and the transposed operation (col2im).

Loops run over the few positions within a window, never over the windows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.tensor.exceptions import NotScalarConstantError

__all__ = ["fold", "to_integer", "iterate_positions", "unfold", "pad_zeros"]


def to_integer(value: Any) -> int:
    """Convert a number or a constant variable to an integer."""
    try:
        return int(pt.get_scalar_constant_value(value))
    except NotScalarConstantError:
        raise TypeError(f"windows, strides, paddings and dilations: expected integers, got {value}") from None


def iterate_positions(
    window_lengths: Sequence[int], output_lengths: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...]]]:
    """Yield each position in a window, and the slices that select its elements in all windows."""
    for position in itertools.product(*map(range, window_lengths)):
        starts = [p * d for p, d in zip(position, dilation, strict=True)]
        axes = zip(starts, output_lengths, stride, strict=True)
        yield position, tuple(slice(start, start + (n - 1) * step + 1, step) for start, n, step in axes)


def unfold(
    array: np.ndarray,
    window_lengths: Sequence[int],
    output_lengths: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
) -> np.ndarray:
    """Return the windows of an array (batch, channel, *spatial) as (batch, channel, *window, *output)."""
    columns: Any = np.empty((*array.shape[:2], *window_lengths, *output_lengths), array.dtype)
    for position, elements in iterate_positions(window_lengths, output_lengths, stride, dilation):
        columns[(slice(None), slice(None), *position)] = array[(slice(None), slice(None), *elements)]
    return columns


def fold(columns: Any, spatial_shape: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> np.ndarray:
    """Return the sum (batch, channel, *spatial) of windows (batch, channel, *window, *output), at their positions."""
    n = len(spatial_shape)
    array: Any = np.zeros((*columns.shape[:2], *spatial_shape), columns.dtype)
    for position, elements in iterate_positions(columns.shape[2 : 2 + n], columns.shape[2 + n :], stride, dilation):
        array[(slice(None), slice(None), *elements)] += columns[(slice(None), slice(None), *position)]
    return array


def pad_zeros(array: Any, before: Sequence[int], lengths: Sequence[int]) -> Any:
    """Return a JAX array padded with zeros on its last axes: ``before`` each, and after it up to ``lengths``."""
    from jax import lax

    lead = array.ndim - len(lengths)
    gaps = [(a, n - a - m, 0) for a, n, m in zip(before, lengths, array.shape[lead:], strict=True)]
    return lax.pad(array, np.zeros((), array.dtype), [(0, 0, 0)] * lead + gaps)
