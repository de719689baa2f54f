"""`make_rowwise`: the terms of some rows equal those of the whole expression, or an error is raised."""

import re

import numpy as np
import pytest
from scipy.sparse import csr_matrix
from scipy.special import gammaln

pytensor = pytest.importorskip("pytensor", reason="it is about PyTensor's graphs")
import pytensor.tensor as pt  # noqa: E402
from pytensor import sparse  # noqa: E402

from synkhronos.extensions.distributed_rows import ComputedRows, get_rows  # noqa: E402
from synkhronos.extensions.pymc.row_restrictor import NotRowwiseError, make_rowwise  # noqa: E402
from synkhronos.extensions.pymc.rowwise_rules import RULES  # noqa: E402

N = 9
RNG = np.random.default_rng(2)
X, Y, GROUP, KIND = RNG.normal(size=(N, 3)), RNG.normal(size=N), RNG.integers(0, 4, N), RNG.integers(0, 3, N)
REVERSED = np.arange(N)[::-1].copy()
x, y, group, kind = pt.constant(X), pt.constant(Y), pt.constant(GROUP), pt.constant(KIND)
SPARSE = csr_matrix(np.where(X > -0.5, X, 0))
shared_x, longer = pytensor.shared(X, "shared_x"), pytensor.shared(np.append(Y, 0.5), "longer")
square = pytensor.shared(RNG.normal(size=(N, N)), "square")
a, w, m, offsets = pt.dscalar("a"), pt.dvector("w"), pt.dmatrix("m"), pt.dvector("offsets")
VALUES = {a: 0.7, w: RNG.normal(size=3), m: RNG.normal(size=(4, 3)), offsets: RNG.normal(size=N)}


def add_inner_graph(op_input):
    inner = pt.dvector("inner")
    return pytensor.compile.builders.OpFromGraph([inner], [pt.exp(inner) + 1])(op_input)


GOOD = {
    "elementwise": y * a + pt.exp(y),
    "a product with a vector": x @ w,
    "with a matrix": (x @ m.T)[:, 1],
    "by dot": pt.dot(x, w),
    "from the other side": w @ x.T,
    "a shared variable": shared_x @ w + y,
    "groups": m[group, 1] + w[kind],
    "two indexes": m[group, kind],
    "columns by groups": (m.T[:, group] * x.T).sum(axis=0),
    "one row's elements by groups": m[1, kind],
    "cumulative sums of each row": pt.cumsum(x * w, axis=1)[:, 2],
    "rows of a matrix": (m[group] * x).sum(axis=1),
    "taken": pt.take(w, kind),
    "columns": x[:, 0] * x[:, 2:].sum(axis=-1),
    "an element of each row": pt.log(pt.special.softmax(x * w, axis=-1))[pt.arange(N), kind],
    "counted by NumPy": (x * w)[np.arange(N), KIND],
    "rows in another order": (m[group] @ w * y)[REVERSED],
    "rows picked from columns": (w @ (x * a).T)[REVERSED],
    "an element of each picked row": pt.log(pt.special.softmax(x * w, axis=-1))[pt.arange(N), kind][REVERSED],
    "longer rows picked": (pt.constant(np.tile(X, (2, 1))) @ w)[REVERSED + N],
    "of longer rows those that a mask picks": (pt.constant(np.tile(X, (2, 1))) @ w)[np.arange(2 * N) % 2 == 0],
    "reversed": (y * a)[::-1],
    "rows and columns of longer rows": (pt.constant(np.tile(X, (2, 1))) * w)[5 : N + 5, 1],
    "rows picked from what may change": pt.exp(shared_x * a)[REVERSED],
    "rows on axis 1 of what may change": (pytensor.shared(X.T) * a).T.sum(axis=1),
    "rows on both axes of what may change": (square * a).sum(axis=0) + (square * w[0])[:, 1],
    "joined rows that may change": pt.concatenate([longer[:4], y[4:]]) * a,
    "differences of what may change": longer[1:] - longer[:-1] * a,
    "a column that is set": pt.set_subtensor((x * a)[:, 1], y)[:, 1] + x[:, 0],
    "columns that grow": pt.inc_subtensor(pt.zeros((N, 3))[:, 1:], x[:, :2] * a).sum(axis=1) * x[:, 0],
    "rows that are set": pt.set_subtensor((x * w)[:, 0][np.array([1, 4, 6])], w) * y,
    "rows by a mask": pt.set_subtensor(pt.set_subtensor(pt.empty(N)[KIND > 0], Y[KIND > 0])[KIND == 0], a) * a,
    "rows of a matrix that are set": pt.set_subtensor(x[np.array([5, 2, 0, -1])], m).sum(axis=1),
    "a sparse design": sparse.dot(SPARSE, w[:, None])[:, 0] * y,
    "a sparse matrix and a dense one": sparse.structured_dot(SPARSE, m.T).sum(axis=1),
    "columns that are set to one number": pt.set_subtensor((x * w)[:, :2], a).sum(axis=1),
    "along an axis": pt.take_along_axis(x * w, kind[:, None], axis=1)[:, 0],
    "log-softmax": pt.special.log_softmax(x * w, axis=1)[:, 0],
    "joined": pt.concatenate([x, (y * a)[:, None]], axis=1).max(axis=1),
    "joined rows": pt.concatenate([y[:2] * a, [0.5], x[3:] @ w]) * y,
    "stacked": pt.stack([y, y * a], axis=1).sum(axis=1),
    "filled": pt.full((N,), a) * y + pt.zeros_like(y),
    "broadcast": pt.broadcast_to(a, (N,)) + y,
    "a parameter's elements, one for each row": offsets[np.arange(N)] * y,
    "a choice": pt.switch(y > a, y, a),
    "standardized by all rows": ((x - x.mean(axis=0)) / x.std(axis=0)) @ w,
    "what depends on how many": y * a / y.shape[0],
    "a known shape": pt.specify_shape(y * a, (N,)),
    "reshaped behind the rows": (x * w).reshape((N, 3, 1)).sum(axis=(1, 2)),
    "transposed and back": (x.T * w[:, None]).T.sum(axis=1),
    "a graph within": add_inner_graph(y * a),
    "of more dimensions": x * w,
    "rows on axis 1": pt.constant(X.T)[1] * a,
    "batched products": (pt.constant(RNG.normal(size=(N, 2, 3))) @ w).sum(axis=1),
    "a batch of matrices": pt.linalg.det(pt.constant(RNG.normal(size=(N, 2, 2))) * a),
}


@pytest.mark.parametrize("case", GOOD)
def test_make_rowwise_of_some_rows_equals_the_whole(case):
    terms = GOOD[case]
    rowwise, rows = make_rowwise(terms, N, RULES)
    inputs = list(VALUES)
    whole = pytensor.function(inputs, terms, on_unused_input="ignore")(*VALUES.values())
    values = [get_rows(source) for source in rows.values()]
    assert all(len(value) == N for value in values)
    part = pytensor.function([*inputs, *rows], rowwise, on_unused_input="ignore")
    for chosen in (slice(0, N), slice(2, 6), slice(5, 7)):
        actual = part(*VALUES.values(), *[value[chosen] for value in values])
        np.testing.assert_allclose(actual, whole[chosen], rtol=1e-12)


def test_make_rowwise_finds_data_once():
    _, rows = make_rowwise((x @ w - y) ** 2 + y, N, RULES)
    assert sorted(value.shape for value in rows.values()) == [(N,), (N, 3)]
    _, rows = make_rowwise(shared_x @ w, N, RULES)
    assert list(rows.values()) == [shared_x]


def test_make_rowwise_picks_rows_of_current_values():
    x = pytensor.shared(X)
    _, rows = make_rowwise((x @ w)[REVERSED][::-1], N, RULES)
    (picked,) = rows.values()
    assert isinstance(picked, ComputedRows) and picked.sources == [x]
    x.set_value(X + 1)
    np.testing.assert_array_equal(get_rows(picked), X + 1)


def test_make_rowwise_folds_constants():
    terms = a * pt.gammaln(pt.exp(y) + 1) + y
    rowwise, rows = make_rowwise(terms, N, RULES)
    assert not any("Gammaln" in str(node.op) for node in pytensor.graph.traversal.applys_between([], [rowwise]))
    np.testing.assert_allclose(sorted(map(np.sum, rows.values())), sorted([Y.sum(), gammaln(np.exp(Y) + 1).sum()]))


def test_make_rowwise_computes_functions_of_data_from_current_values():
    x, y = pytensor.shared(X), pytensor.shared(Y)
    terms = a * pt.gammaln(pt.exp(y) + 1) + (x - x.mean(axis=0)) @ w + x @ w + y[::-1]
    rowwise, rows = make_rowwise(terms, N, RULES)
    assert not any("Gammaln" in str(node.op) for node in pytensor.graph.traversal.applys_between([], [rowwise]))
    assert x in rows.values()
    for length in (N, N + 2):
        x.set_value(RNG.normal(size=(length, 3)))
        y.set_value(RNG.normal(size=length))
        values = list(map(get_rows, rows.values()))
        actual = pytensor.function([a, w, *rows], rowwise)(VALUES[a], VALUES[w], *values)
        np.testing.assert_allclose(actual, pytensor.function([a, w], terms)(VALUES[a], VALUES[w]), rtol=1e-12)


def test_make_rowwise_leaves_large_functions_of_data_to_the_ranks():
    """They would need more memory than the data."""
    y = pytensor.shared(Y)
    _, rows = make_rowwise(pt.exp(y[:, None] * np.arange(1.0, 20)) @ (a * np.ones(19)), N, RULES)
    assert y in rows.values()


def test_make_rowwise_ignores_constant_columns():
    holds, trials = pt.constant(Y > -100), pt.constant(np.full(N, 7))
    rowwise, rows = make_rowwise(pt.switch(holds, y * a - trials, -np.inf), N, RULES)
    assert [values.dtype for values in rows.values()] == ["float64"]
    value = pytensor.function([a, *rows], rowwise, mode="FAST_COMPILE")(0.5, Y[:4])
    np.testing.assert_allclose(value, Y[:4] * 0.5 - 7)
    # It is folded if it has no rows.
    rowwise, rows = make_rowwise(pt.switch(holds, a, -np.inf), N, RULES)
    assert pytensor.function([a, *rows], rowwise, mode="FAST_COMPILE")(0.5, np.ones(4, bool)).tolist() == [0.5] * 4


BAD = {
    "one number": ((y * a).sum(), N, "one number for all rows, as where these depend on each other"),
    "differences of a sum over rows": (pt.cumsum(y * a)[1:], N - 1, "picks rows"),
    "rows up to a parameter": ((y * a)[: pt.cast(a, "int64")], N - 1, "picks rows"),
    "a cumulative sum": (pt.cumsum(y * a), N, "mixes rows"),
    "a mean over rows": ((y * a) - (y * a).mean(), N, "needs all rows at once"),
    "softmax over rows": (pt.special.softmax(y * a), N, "mixes rows"),
    "softmax over all": (pt.special.softmax(x * a, axis=None), N, "mixes rows"),
    "joined rows whose lengths may change": (pt.concatenate([longer[:4] * a, y[4:]]), N, "mixes rows"),
    "sorted": (pt.sort(y * a), N, "not known to work row by row"),
    "rows that are set": (pt.set_subtensor((y * a)[:2], 0.0), N, "mixes rows"),
    "rows picked by what may change": ((y * a)[pytensor.shared(REVERSED)], N, "needs all rows at once"),
    "rows of a sum over rows": (pt.cumsum(y * a)[REVERSED], N, "needs all rows at once"),
    "a parameter for each row": (y * offsets, N, "'offsets' has an element for each row"),
    "another length": (y * a, N - 1, "has shape (9,), but there are 8 rows"),
    "flattened": ((x * w).flatten(), 3 * N, "may mix rows"),
    "a mask over all axes": ((x * w)[pt.constant(X > 0)], int((X > 0).sum()), "mixes rows"),
    "a cumulative sum of all": (pt.cumsum(x * w)[:N], N, "picks rows"),
    "no data": (pt.full((N,), a), N, "no data run along the rows"),
    "an inverse": (pt.linalg.inv(pt.constant(X[:3]) * a), 3, "mixes rows"),
    "random numbers": (y + pt.random.normal(size=(N,)), N, "not known to work row by row"),
    "shared rows on axis 1": (shared_x.T[1] * a + shared_x[1, 0], 3, "there are 3 rows"),
}


@pytest.mark.parametrize("case", BAD)
def test_make_rowwise_refuses_graphs_that_mix_rows(case):
    terms, length, message = BAD[case]
    with pytest.raises(NotRowwiseError, match=re.escape(message)):
        make_rowwise(terms, length, RULES)
