"""The module ``theano.tensor.signal.pool``, on PyTensor: pooling over the last axes."""

import functools
import warnings
from typing import Any

import pytensor.tensor as pt

from synkhronos.compat.ops.pooling import MaxPoolGrad, Pool
from synkhronos.compat.ops.windows import integer


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
    """Pool the last axes.

    Parameters
    ----------
    n : int
        How many axes.
    input : variable
    ws : sequence of int
        The lengths of a window, a number for each axis.
    ignore_border : bool
        Whether windows that reach over the edge are left out; False by default, with a warning.
    stride : sequence of int, optional
        From one window to the next; a window's lengths by default.
    pad : sequence of int, optional
        What is added on each side; nothing by default.
    mode : {'max', 'sum', 'average_inc_pad', 'average_exc_pad'}
        Whether the mean counts what was added.
    ds, st, padding : optional
        Old names of ``ws``, ``stride`` and ``pad``.

    Returns
    -------
    variable

    Examples
    --------
    >>> pool_2d(np.arange(4.0).reshape(1, 1, 2, 2), (2, 2), ignore_border=True).eval()[0, 0]
    array([[3.]])
    """
    ws, stride = _either("ws", ws, "ds", ds), _either("stride", stride, "st", st)
    pad = pad if padding is None else padding
    if ws is None:
        raise ValueError("You must provide a tuple value for the window size.")
    if ignore_border is None:
        warnings.warn(f"pool_{n}d() without ignore_border takes it to be False, as Theano did", stacklevel=2)
        ignore_border = False
    x = pt.as_tensor_variable(input)
    if x.ndim < n:
        raise NotImplementedError(f"pool_{n}d requires a dimension >= {n}")
    settings = (ws, ws if stride is None else stride, pad or (0,) * n)
    window, step, around = ([integer(setting[axis]) for axis in range(n)] for setting in settings)
    return Pool(window, step, around, mode.replace("max_deterministic", "max"), ignore_border)(x)


def _either(name: str, value: Any, old_name: str, old: Any) -> Any:
    if value is not None and old is not None:
        raise ValueError(f"You can't provide a tuple value to both '{name}' and '{old_name}'.")
    return old if value is None else value


pool_2d = functools.partial(_pool, 2)
pool_3d = functools.partial(_pool, 3)


def max_pool_2d_same_size(input: Any, patch_size: Any) -> Any:
    """Set all but the maximum of each window to zero."""
    window = [integer(n) for n in patch_size]
    output = Pool(window, window, (0, 0), "max", True)(input)
    return MaxPoolGrad(window, window, (0, 0), "max", True)(input, output, output)
