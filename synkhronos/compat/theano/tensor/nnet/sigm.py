"""The module ``theano.tensor.nnet.sigm``, on PyTensor: the sigmoid and approximations of it."""

from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.tensor import sigmoid, softplus


def _as_float(x: Any) -> Any:
    """Return a variable of floats, in the dtype to which Theano converted it."""
    x = pt.as_tensor_variable(x)
    if x.dtype.startswith("float"):
        return x
    return x.astype("float32" if x.dtype in ("int8", "uint8", "int16") else "float64")


def ultra_fast_sigmoid(x: Any) -> Any:
    """Return an approximation of the sigmoid by a rational and linear functions; its error is at most 0.02."""
    x = _as_float(x) * np.asarray(0.5, _as_float(x).dtype)
    size = pt.abs(x)
    slope = 0.935409070603099 + 0.0458812946797165 * (size - 1.7)
    z = pt.switch(size < 1.7, 1.5 * size / (1 + size), pt.switch(size < 3, slope, 0.99505475368673))
    return (0.5 * (pt.switch(x >= 0, z, -z) + 1)).astype(x.dtype)


def hard_sigmoid(x: Any) -> Any:
    """Return the approximation ``clip(0.2 * x + 0.5, 0, 1)`` of the sigmoid."""
    x = _as_float(x)
    zero, slope, half, upper = (np.asarray(value, x.dtype) for value in (0, 0.2, 0.5, 1))
    return pt.clip(x * slope + half, zero, upper)
