"""The module ``theano.tensor.nlinalg``, on PyTensor: linear algebra that Theano took from NumPy."""

from typing import Any

import pytensor.tensor as pt
from pytensor.tensor.basic import ExtractDiag, diag
from pytensor.tensor.linalg import (
    Det,
    Eig,
    Eigh,
    MatrixInverse,
    MatrixPinv,
    TensorInv,
    TensorSolve,
    det,
    eig,
    eigh,
    lstsq,
    matrix_dot,
    matrix_inverse,
    matrix_power,
    norm,
    pinv,
    qr,
    svd,
    tensorinv,
    tensorsolve,
    trace,
)

__all__ = [
    "Det",
    "Eig",
    "Eigh",
    "ExtractDiag",
    "MatrixInverse",
    "MatrixPinv",
    "TensorInv",
    "TensorSolve",
    "alloc_diag",
    "det",
    "diag",
    "eig",
    "eigh",
    "extract_diag",
    "lstsq",
    "matrix_dot",
    "matrix_inverse",
    "matrix_power",
    "norm",
    "pinv",
    "qr",
    "svd",
    "tensorinv",
    "tensorsolve",
    "trace",
]


def alloc_diag(x: Any) -> Any:
    """Return the matrix with a vector on its diagonal."""
    return pt.diag(x)


def extract_diag(x: Any) -> Any:
    """Return a matrix's diagonal."""
    return pt.diagonal(x)
