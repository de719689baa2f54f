"""The module ``theano.tensor.slinalg``, on PyTensor: SciPy's linear algebra."""

from typing import Any

from pytensor.tensor.linalg import *
from pytensor.tensor.linalg import Cholesky, Eigvalsh, Expm, Solve, solve, solve_triangular


def solve_lower_triangular(a: Any, b: Any) -> Any:
    """Solve ``a x = b`` for a lower triangular matrix."""
    return solve_triangular(a, b, lower=True)


def solve_upper_triangular(a: Any, b: Any) -> Any:
    """Solve ``a x = b`` for an upper triangular matrix."""
    return solve_triangular(a, b, lower=False)


def solve_symmetric(a: Any, b: Any) -> Any:
    """Solve ``a x = b`` for a symmetric matrix."""
    return solve(a, b, assume_a="sym")
