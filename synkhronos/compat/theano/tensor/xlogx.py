"""The module ``theano.tensor.xlogx``, on PyTensor: products with logarithms, with 0 * log(0) = 0."""

from typing import Any

from pytensor.tensor.special import xlogy


def xlogx(x: Any) -> Any:
    """Return ``x * log(x)``.

    Examples
    --------
    >>> T.xlogx.xlogx(np.array([0.0, 1.0])).eval()
    array([0., 0.])
    """
    return xlogy(x, x)


def xlogy0(x: Any, y: Any) -> Any:
    """Return ``x * log(y)``.

    Examples
    --------
    >>> T.xlogx.xlogy0(np.array([0.0, 2.0]), np.array([0.0, 1.0])).eval()
    array([0., 0.])
    """
    return xlogy(x, y)
