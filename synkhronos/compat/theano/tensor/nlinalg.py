"""The module ``theano.tensor.nlinalg``, on PyTensor: NumPy's linear algebra."""

from typing import Any

import pytensor.tensor as pt
from pytensor.tensor.basic import ExtractDiag, diag
from pytensor.tensor.basic import diag as alloc_diag
from pytensor.tensor.basic import diagonal as extract_diag
from pytensor.tensor.linalg import *
from pytensor.tensor.linalg import Det, Eig, Eigh, MatrixInverse, MatrixPinv, TensorInv, TensorSolve, matrix_inverse


def qr(a: Any, mode: str = "reduced") -> Any:
    """Return the QR decomposition, by default with as few rows and columns as necessary.  With 'r', return only R.

    Examples
    --------
    >>> q, r = T.nlinalg.qr(np.ones((4, 3)))
    >>> q.eval().shape, r.eval().shape
    ((4, 3), (3, 3))
    """
    # PyTensor's mode "r" returns a row of zeros for each row of the matrix beyond its columns.
    return pt.linalg.qr(a, mode="reduced")[1] if mode == "r" else pt.linalg.qr(a, mode=mode)
