"""The module ``theano.tensor.slinalg``, on PyTensor: SciPy's linear algebra."""

from functools import partial

from pytensor.tensor.linalg import *
from pytensor.tensor.linalg import Cholesky, Eigvalsh, Expm, Solve, solve, solve_triangular

solve_lower_triangular, solve_upper_triangular = (partial(solve_triangular, lower=lower) for lower in (True, False))
solve_symmetric = partial(solve, assume_a="sym")
