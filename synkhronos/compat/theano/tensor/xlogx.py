"""The module ``theano.tensor.xlogx``, on PyTensor: products with logarithms, with 0 * log(0) = 0."""

from typing import Any

from pytensor.tensor.special import xlogy


def xlogx(x: Any) -> Any:
    """Return ``x * log(x)``."""
    return xlogy(x, x)


def xlogy0(x: Any, y: Any) -> Any:
    """Return ``x * log(y)``."""
    return xlogy(x, y)
