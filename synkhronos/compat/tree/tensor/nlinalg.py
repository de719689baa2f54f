"""The module ``theano.tensor.nlinalg``, on PyTensor: NumPy's linear algebra."""

from pytensor.tensor.basic import ExtractDiag, diag
from pytensor.tensor.basic import diag as alloc_diag
from pytensor.tensor.basic import diagonal as extract_diag
from pytensor.tensor.linalg import *
from pytensor.tensor.linalg import Det, Eig, Eigh, MatrixInverse, MatrixPinv, TensorInv, TensorSolve, matrix_inverse
