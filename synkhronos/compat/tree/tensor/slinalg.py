"""The module ``theano.tensor.slinalg``, on PyTensor: linear algebra that Theano took from SciPy."""

from typing import Any

import pytensor.tensor.linalg as _linalg
from pytensor.tensor.linalg import Cholesky, Eigvalsh, Expm, Solve, cholesky, eigvalsh, expm, kron, solve

__all__ = [
    "Cholesky",
    "Eigvalsh",
    "Expm",
    "Solve",
    "cholesky",
    "eigvalsh",
    "expm",
    "kron",
    "solve",
    "solve_lower_triangular",
    "solve_symmetric",
    "solve_upper_triangular",
]


def solve_lower_triangular(a: Any, b: Any) -> Any:
    """Solve ``a x = b`` for a lower triangular matrix."""
    return _linalg.solve_triangular(a, b, lower=True)


def solve_upper_triangular(a: Any, b: Any) -> Any:
    """Solve ``a x = b`` for an upper triangular matrix."""
    return _linalg.solve_triangular(a, b, lower=False)


def solve_symmetric(a: Any, b: Any) -> Any:
    """Solve ``a x = b`` for a symmetric matrix."""
    return _linalg.solve(a, b, assume_a="sym")
