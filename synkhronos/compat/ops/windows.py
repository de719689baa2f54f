"""Windows of an array as columns, and back.

`unfold` copies the elements of each window side by side.  `fold`, its transpose, adds windows where they overlap.
Loops run over the few positions within a window, never over the windows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.tensor.exceptions import NotScalarConstantError

__all__ = ["fold", "integer", "offsets", "unfold", "zeros_around"]


def integer(value: Any) -> int:
    """Return an integer, also of a constant variable: a graph is built for one window.

    Examples
    --------
    >>> integer(pt.constant(3))
    3
    """
    try:
        return int(pt.get_scalar_constant_value(value))
    except NotScalarConstantError:
        raise TypeError(f"windows, strides, paddings and dilations have to be numbers, not {value}") from None


def offsets(
    kernel: Sequence[int], out: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...]]]:
    """Yield each place in a window, and the slices that pick it out of all windows.

    Examples
    --------
    >>> list(offsets((2,), (3,), (2,), (1,)))
    [((0,), (slice(0, 5, 2),)), ((1,), (slice(1, 6, 2),))]
    """
    for place in itertools.product(*map(range, kernel)):
        starts = [p * d for p, d in zip(place, dilation, strict=True)]
        yield place, tuple(slice(a, a + (n - 1) * s + 1, s) for a, n, s in zip(starts, out, stride, strict=True))


def unfold(
    array: np.ndarray, kernel: Sequence[int], out: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> np.ndarray:
    """Return the windows of (batch, channel, *spatial) as (batch, channel, *kernel, *out).

    Examples
    --------
    >>> unfold(np.arange(4.0).reshape(1, 1, 4), (2,), (3,), (1,), (1,))[0, 0]
    array([[0., 1., 2.],
           [1., 2., 3.]])
    """
    columns: Any = np.empty((*array.shape[:2], *kernel, *out), array.dtype)
    for place, window in offsets(kernel, out, stride, dilation):
        columns[(slice(None), slice(None), *place)] = array[(slice(None), slice(None), *window)]
    return columns


def fold(columns: Any, spatial: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> np.ndarray:
    """Return (batch, channel, *spatial) with each window of (batch, channel, *kernel, *out) added in its place.

    Examples
    --------
    >>> fold(np.ones((1, 1, 2, 3)), (4,), (1,), (1,))[0, 0]
    array([1., 2., 2., 1.])
    """
    n = len(spatial)
    kernel, out = columns.shape[2 : 2 + n], columns.shape[2 + n :]
    array: Any = np.zeros((*columns.shape[:2], *spatial), columns.dtype)
    for place, window in offsets(kernel, out, stride, dilation):
        array[(slice(None), slice(None), *window)] += columns[(slice(None), slice(None), *place)]
    return array


def zeros_around(array: Any, before: Sequence[int], lengths: Sequence[int]) -> Any:
    """Return an array of JAX's with so many zeros ``before`` its last axes, and behind them up to these lengths."""
    from jax import lax

    lead = array.ndim - len(lengths)
    gaps = [(a, n - a - m, 0) for a, n, m in zip(before, lengths, array.shape[lead:], strict=True)]
    return lax.pad(array, np.zeros((), array.dtype), [(0, 0, 0)] * lead + gaps)
