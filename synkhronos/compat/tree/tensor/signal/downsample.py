"""Module of Theano up to 0.9, on ``signal.pool``; Lasagne 0.1 imports it."""

from typing import Any

from theano.tensor.signal import pool

max_pool_2d_same_size = pool.max_pool_2d_same_size


def max_pool_2d(
    input: Any, ds: Any, ignore_border: bool = False, st: Any = None, padding: Any = (0, 0), mode: str = "max"
) -> Any:
    """Pool the last two axes.

    Parameters
    ----------
    input : variable
    ds : (int, int)
        Rows and columns of a window.
    ignore_border : bool
        Whether windows that reach over the edge are left out.
    st : (int, int), optional
        Rows and columns from one window to the next; a window's size by default.
    padding : (int, int)
        Rows and columns added on each side.
    mode : {'max', 'sum', 'average_inc_pad', 'average_exc_pad'}

    Returns
    -------
    variable

    Examples
    --------
    >>> max_pool_2d(T.ftensor4(), ds=(2, 2)).ndim
    4
    """
    return pool.pool_2d(input, ws=ds, ignore_border=bool(ignore_border), stride=st, pad=padding, mode=mode)
