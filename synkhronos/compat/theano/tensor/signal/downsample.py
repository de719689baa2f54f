"""The module ``theano.tensor.signal.downsample`` of Theano up to 0.9, which Lasagne 0.1 imports."""

from typing import Any

from theano.tensor.signal import pool

max_pool_2d_same_size = pool.max_pool_2d_same_size


def max_pool_2d(
    input: Any, ds: Any, ignore_border: bool = False, st: Any = None, padding: Any = (0, 0), mode: str = "max"
) -> Any:
    """Pool the last two axes, by the old interface of `pool.pool_2d`."""
    return pool.pool_2d(input, ws=ds, ignore_border=bool(ignore_border), stride=st, pad=padding, mode=mode)
