"""The module ``theano.tensor.signal.pool``, on PyTensor: pooling over the last axes."""

import warnings
from typing import Any

import pytensor.tensor as pt

from synkhronos.compat.ops.pooling import MaxPoolGrad, Pool

__all__ = ["max_pool_2d_same_size", "pool_2d", "pool_3d"]


def pool_2d(
    input: Any,
    ws: Any = None,
    ignore_border: bool | None = None,
    stride: Any = None,
    pad: Any = (0, 0),
    mode: str = "max",
    ds: Any = None,
    st: Any = None,
    padding: Any = None,
) -> Any:
    """Pool the last two axes.

    Parameters
    ----------
    input : variable
    ws : (int, int)
        Rows and columns of a window.
    ignore_border : bool
        Whether windows that reach over the edge are left out; False by default, with a warning.
    stride : (int, int), optional
        Rows and columns from one window to the next; a window's size by default.
    pad : (int, int)
        Rows and columns added on each side.
    mode : {'max', 'sum', 'average_inc_pad', 'average_exc_pad'}
        Whether the mean counts what was added.
    ds, st, padding : optional
        Old names of ``ws``, ``stride`` and ``pad``.

    Returns
    -------
    variable

    Examples
    --------
    >>> pool.pool_2d(np.arange(4.0).reshape(1, 1, 2, 2), (2, 2), ignore_border=True).eval()[0, 0]
    array([[3.]])
    """
    return _pool(2, input, ws, ignore_border, stride, pad, mode, ds, st, padding)


def pool_3d(
    input: Any,
    ws: Any = None,
    ignore_border: bool | None = None,
    stride: Any = None,
    pad: Any = (0, 0, 0),
    mode: str = "max",
    ds: Any = None,
    st: Any = None,
    padding: Any = None,
) -> Any:
    """Pool the last three axes; the arguments are those of `pool_2d`, with three numbers each."""
    return _pool(3, input, ws, ignore_border, stride, pad, mode, ds, st, padding)


def max_pool_2d_same_size(input: Any, patch_size: Any) -> Any:
    """Set all but the maximum of each window to zero."""
    window = [_integer(n) for n in patch_size]
    output = Pool(window, window, (0, 0), "max", True)(input)
    return MaxPoolGrad(window, window, (0, 0), "max", True)(input, output, output)


def _pool(
    n: int, x: Any, ws: Any, ignore_border: Any, stride: Any, pad: Any, mode: str, ds: Any, st: Any, padding: Any
) -> Any:
    ws = _either("ws", ws, "ds", ds)
    stride = _either("stride", stride, "st", st)
    if padding is not None:
        pad = padding
    if ws is None:
        raise ValueError("You must provide a tuple value for the window size.")
    if ignore_border is None:
        warnings.warn(f"pool_{n}d() without ignore_border takes it to be False, as Theano did", stacklevel=3)
        ignore_border = False
    x = pt.as_tensor_variable(x)
    if x.ndim < n:
        raise NotImplementedError(f"pool_{n}d requires a dimension >= {n}")
    window = _integers(ws, n)
    step = window if stride is None else _integers(stride, n)
    return Pool(window, step, _integers(pad or (0,) * n, n), mode.replace("max_deterministic", "max"), ignore_border)(x)


def _either(name: str, value: Any, old_name: str, old: Any) -> Any:
    if value is not None and old is not None:
        raise ValueError(f"You can't provide a tuple value to both '{name}' and '{old_name}'.")
    return old if value is None else value


def _integers(values: Any, n: int) -> list[int]:
    return [_integer(values[i]) for i in range(n)]


def _integer(value: Any) -> int:
    """Return an integer, also of a constant variable: windows are fixed when a graph is built."""
    try:
        return int(pt.get_scalar_constant_value(value))
    except pt.exceptions.NotScalarConstantError:
        raise TypeError(f"windows, strides and pads have to be numbers, not {value}") from None
