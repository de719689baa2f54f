"""Simplification of sums and products: of long ones in linear time, of short ones as before."""

import numpy as np
import pytest
from library import NAME
from library import tensor as T

import synkhronos as synk


@pytest.mark.timeout(60)
def test_stacked_concatenations_compile_in_linear_time(fork):
    # The last level has 16,384 columns; PyTensor alone would write their number as a sum of 16,384 terms.
    def stacked(module, x):
        for _ in range(7):
            x = module.concatenate([x, module.tanh(x), module.sin(x), module.cos(x)], axis=1)
        return x.mean()

    fork(2)
    x = T.dmatrix("x")
    f = synk.function([x], (stacked(T, x), "avg"))
    rows = np.array([[0.5], [-2.0]])
    np.testing.assert_allclose(f(rows), stacked(np, rows), rtol=1e-6)


def test_small_sums_are_still_simplified():
    if NAME == "theano":
        pytest.skip("about PyTensor's rewrites")
    import pytensor

    x, y = T.dmatrices("x", "y")
    half = x + y
    f = pytensor.function([x, y], (half + half) - (half + half) + 3 * x * y / y, mode="NUMBA")
    assert not any("Sub" in str(node.op) or "Div" in str(node.op) for node in f.maker.fgraph.apply_nodes)
