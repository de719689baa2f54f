"""The module ``theano.tensor.slinalg``, on PyTensor: SciPy's linear algebra."""

from functools import partial
from typing import Any

import pytensor.tensor as pt
from numpy.linalg import LinAlgError
from pytensor.raise_op import CheckAndRaise
from pytensor.tensor import linalg
from pytensor.tensor.linalg import *
from pytensor.tensor.linalg import Cholesky, Eigvalsh, Expm, Solve, solve_triangular


def cholesky(x: Any, lower: bool = True, on_error: str = "raise", **kwargs: Any) -> Any:
    """Return the Cholesky factor; with ``on_error="nan"``, NaN if the matrix is not positive definite.

    JAX mode always returns NaN.
    """
    factor = linalg.cholesky(x, lower, **kwargs)
    return factor if on_error == "nan" else _refuse_nan(factor, "the matrix is not positive definite")


def solve(a: Any, b: Any, **kwargs: Any) -> Any:
    """Return ``x`` of ``a x = b``.  A singular matrix raises LinAlgError; in JAX mode, the result is not finite."""
    return _refuse_nan(linalg.solve(a, b, **kwargs), "the matrix is singular")


def _refuse_nan(result: Any, message: str) -> Any:
    """Return a result that raises LinAlgError when it is computed and has a NaN, as PyTensor's failures have."""
    return CheckAndRaise(LinAlgError, message)(result, pt.all(~pt.isnan(result)))


def _solve_triangular(a: Any, b: Any, lower: bool) -> Any:
    return _refuse_nan(solve_triangular(a, b, lower=lower), "the matrix is singular")


solve_lower_triangular, solve_upper_triangular = (partial(_solve_triangular, lower=lower) for lower in (True, False))
solve_symmetric = partial(solve, assume_a="sym")
