"""The module ``theano.tensor.signal.pool``, on PyTensor: pooling over the last axes."""

import functools
import warnings
from typing import Any

import pytensor.tensor as pt

from synkhronos.compat.ops.pooling import MaxPoolGrad, Pool
from synkhronos.compat.ops.windows import to_window_parameter


def _pool(
    n: int,
    input: Any,
    ws: Any = None,
    ignore_border: bool | None = None,
    stride: Any = None,
    pad: Any = None,
    mode: str = "max",
    ds: Any = None,
    st: Any = None,
    padding: Any = None,
) -> Any:
    """Pool the last ``n`` axes."""
    ws, stride = _resolve_old_name("ws", ws, "ds", ds), _resolve_old_name("stride", stride, "st", st)
    pad = pad if padding is None else padding
    if ws is None:
        raise ValueError("You must provide a tuple value for the window size.")
    if ignore_border is None:
        warnings.warn(f"pool_{n}d: ignore_border is not given; it is False by default, as in Theano", stacklevel=2)
        ignore_border = False
    x = pt.as_tensor_variable(input)
    if x.ndim < n:
        raise NotImplementedError(f"pool_{n}d: expected at least {n} dimensions, got {x.ndim}")
    settings = (ws, ws if stride is None else stride, pad or (0,) * n)
    window, step, padding_lengths = ([to_window_parameter(setting[axis]) for axis in range(n)] for setting in settings)
    return Pool(window, step, padding_lengths, mode.replace("max_deterministic", "max"), ignore_border)(x)


def _resolve_old_name(name: str, value: Any, old_name: str, old_value: Any) -> Any:
    if value is not None and old_value is not None:
        raise ValueError(f"You can't provide a tuple value to both '{name}' and '{old_name}'.")
    return old_value if value is None else value


def _compute_output_shape(
    imgshape: Any,
    ws: Any = None,
    ignore_border: bool = False,
    stride: Any = None,
    pad: Any = None,
    ndim: int = 2,
    ds: Any = None,
    st: Any = None,
    padding: Any = None,
) -> list[Any]:
    """Return the shape of a pooled array, given the shape of the array: ``Pool.out_shape``."""
    ws, stride = _resolve_old_name("ws", ws, "ds", ds), _resolve_old_name("stride", stride, "st", st)
    pad = (pad if padding is None else padding) or (0,) * ndim
    op = Pool(ws, ws if stride is None else stride, pad, "max", ignore_border)
    return list(op.compute_output_shape(tuple(imgshape)))


Pool.out_shape = staticmethod(_compute_output_shape)
pool_2d = functools.partial(_pool, 2)
pool_3d = functools.partial(_pool, 3)


def max_pool_2d_same_size(input: Any, patch_size: Any) -> Any:
    """Set all but the maximum of each window to zero."""
    window = [to_window_parameter(n) for n in patch_size]
    output = Pool(window, window, (0, 0), "max", True)(input)
    return MaxPoolGrad(window, window, (0, 0), "max", True)(input, output, output)
