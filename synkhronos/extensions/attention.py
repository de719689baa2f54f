"""Attention of transformers, by cuDNN's fused kernel where JAX mode can use it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytensor.tensor as pt

from synkhronos.lowering.attention_ops import Attention
from synkhronos.variable_types import Variable

__all__ = ["dot_product_attention"]


def dot_product_attention(
    query: Variable,
    key: Variable,
    value: Variable,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
) -> Any:
    """Return ``softmax(query @ key.T * scale) @ value`` for each head.

    Parameters
    ----------
    query : variable of shape (batch, length, heads, width)
        Of float16, float32 or float64.
    key, value : variables of shape (batch, key length, heads, width)
        Of the dtype of `query`.
    mask : variable of bool, optional
        True where a query may attend to a key.  Of at most four dimensions that broadcast to (batch, heads, length, key
        length); PyTensor has to know which of its lengths are 1.
    scale : float, optional
        Factor of the products; ``1 / sqrt(width)`` by default.
    is_causal : bool
        Whether query i may attend to the keys 0 to i only.

    Returns
    -------
    variable of shape (batch, length, heads, width)
        For a query without a key that it may attend to: the mean of all values.

    Raises
    ------
    TypeError
        If dtypes differ or are not floats, or if `mask` is not boolean.
    ValueError
        If an argument has another number of dimensions, or lengths that are known not to match.

    Notes
    -----
    On GPUs of compute capability 8.0 or higher, JAX mode calls cuDNN's fused kernel on three conditions.  The factors
    are float16, or float32 in products of bfloat16 (``JAX_DEFAULT_MATMUL_PRECISION=bfloat16``).  `width` is a multiple
    of 8 up to 128.  With a mask, both lengths are even.  The kernel stores no matrix of (length, key length).  All else
    is computed as written above, in float32 or float64.

    Examples
    --------
    >>> import numpy as np, pytensor.tensor as pt
    >>> x = pt.tensor4("x")
    >>> dot_product_attention(x, x, x, is_causal=True).eval({x: np.ones((1, 3, 1, 2))}).shape
    (1, 3, 1, 2)
    """
    names = "query", "key", "value"
    tensors = [pt.as_tensor_variable(tensor) for tensor in (query, key, value)]
    for name, tensor in zip(names, tensors, strict=True):
        if tensor.dtype not in ("float16", "float32", "float64") or tensor.dtype != tensors[0].dtype:
            raise TypeError(f"{name}: expected {names[0]}'s dtype, a float, got {tensor.dtype}")
        if tensor.ndim != 4:
            raise ValueError(f"{name}: expected (batch, length, heads, width), got {tensor.ndim} dimensions")
        for axis, length in enumerate(tensor.type.shape):
            expected_length = tensors[1 if name == "value" else 0].type.shape[axis]
            if None not in (length, expected_length) and length != expected_length and (axis != 1 or name == "value"):
                raise ValueError(f"{name}: expected a length of {expected_length} at axis {axis}, got {length}")
    if mask is not None:
        mask = pt.as_tensor_variable(mask)
        if mask.dtype != "bool":
            raise TypeError(f"mask: expected bool, got {mask.dtype}")
        if mask.ndim > 4:
            raise ValueError(f"mask: expected at most 4 dimensions, got {mask.ndim}")
        tensors.append(pt.shape_padleft(mask, 4 - mask.ndim))
    if scale is not None and not np.isfinite(scale):
        raise ValueError(f"scale: expected a finite number, got {scale}")
    return Attention(None if scale is None else float(scale), bool(is_causal))(*tensors)
