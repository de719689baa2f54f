"""The module ``theano.tensor.xlogx``, on PyTensor: products with logarithms, with 0 * log(0) = 0."""

from typing import Any

from pytensor.tensor.special import xlogy as xlogy0


def xlogx(x: Any) -> Any:
    """Return ``x * log(x)``."""
    return xlogy0(x, x)
