"""In JAX mode: lengths that follow from integer inputs, as of the rows ``x[i * b:(i + 1) * b]``."""

import numpy as np
import pytest

pytest.importorskip("pytensor")
pytest.importorskip("jax")

import theano
import theano.tensor as T
from theano.ifelse import ifelse
from theano.tensor.shared_randomstreams import RandomStreams

# PyTensor's JAX mode warns that it leaves out assertions and copies generators.
pytestmark = pytest.mark.filterwarnings("ignore:Skipping:UserWarning", "ignore:The RandomType:UserWarning")

X = np.random.default_rng(0).normal(size=(25, 6))


def compile_function(inputs, outputs, **kwargs):
    return theano.function(inputs, outputs, mode="JAX", **kwargs)


def compare_modes(inputs, output, *calls, **kwargs):
    """Compare a graph in JAX mode with the same in another."""
    graph, expected = (
        compile_function(inputs, output, **kwargs),
        theano.function(inputs, output, mode="FAST_COMPILE", **kwargs),
    )
    for values in calls:
        np.testing.assert_allclose(graph(*values), expected(*values), err_msg=str(values))
    return graph


def count_compilations(f):
    """Return the number of XLA's compilations of a function."""
    return f.vm.jit_fn.compiled._cache_size()


@pytest.fixture
def x():
    """Return a shared matrix."""
    return theano.shared(X, "x")


@pytest.fixture
def i():
    """Return an integer input."""
    return T.lscalar("i")


def test_full_batches_share_one_compilation(x, i):
    f = compare_modes([i], T.exp(x[i * 10 : (i + 1) * 10]).sum(axis=0), (0,), (1,))
    assert count_compilations(f) == 1
    assert f(2).shape == (6,)  # the last batch is smaller
    assert count_compilations(f) == 2


@pytest.mark.parametrize("n_outputs", [1, 2])
def test_lengths_that_both_branches_have_are_known(n_outputs):
    x, condition = T.dmatrix("x"), T.lscalar("condition")
    pairs = [(x * 2, x + 1), (x.sum(), x.mean())][:n_outputs]
    branches = zip(*pairs, strict=True)
    chosen, *others = ifelse(condition, *map(list, branches))
    flat = chosen.reshape((chosen.shape[0] * chosen.shape[1],)) + sum(others)
    compare_modes([x, condition], flat, (X, 0), (X, 1), (X[:3], 1))


def test_lengths_that_differ_between_branches_are_refused():
    x, condition = T.dmatrix("x"), T.lscalar("condition")
    rows = ifelse(condition, x, x[:2])
    f = compile_function([x, condition], T.zeros(rows.shape[0]))
    with pytest.raises(NotImplementedError, match="depends on the values of arrays"):
        f(X, 1)
    assert f(X[:2], 1).shape == (2,)  # here, both branches have two rows


def test_mean_and_length_are_those_of_the_selected_rows(x, i):
    rows = x[i * 10 : (i + 1) * 10, 0]
    f = compile_function([i], [T.cos(rows.mean()), T.zeros(rows.shape[0] + 1) + rows.sum()])
    cosine, sums = f(2)
    np.testing.assert_allclose(cosine, np.cos(X[20:, 0].mean()))
    np.testing.assert_allclose(sums, np.full(6, X[20:, 0].sum()))


SLICES = {
    "one row": lambda x, i, j: x[i : i + 1],
    "between two": lambda x, i, j: x[i:j],
    "from": lambda x, i, j: x[i:],
    "up to": lambda x, i, j: x[:j],
    "up to the last": lambda x, i, j: x[i:-1],
    "from behind": lambda x, i, j: x[-j:],
    "every other": lambda x, i, j: x[i:j:2],
    "backwards": lambda x, i, j: x[j:i:-1],
    "backwards from": lambda x, i, j: x[j::-2],
    "a symbolic step": lambda x, i, j: x[::j],
    "columns": lambda x, i, j: x[:, i:j],
    "both": lambda x, i, j: x[i : i + 2, i:j],
    "beside an integer": lambda x, i, j: x[i, i:j],
    "beside a length": lambda x, i, j: x[x.shape[0] - 1, i:j],
    "beside indexes": lambda x, i, j: x[i:j, [0, 0, 4]],
    "behind indexes": lambda x, i, j: x[[0, 0, 4], i:j],
    "of a computed array": lambda x, i, j: T.concatenate([x, 2 * x])[i * 20 : j * 20],
    "of a product": lambda x, i, j: T.dot(x, x.T)[i * 5 : j * 5],
    "of a slice": lambda x, i, j: x[i:][:j],
    "of a shape's length": lambda x, i, j: x[: x.shape[0] // j],
    "unsigned": lambda x, i, j: x[T.cast(i, "uint8") : T.cast(j, "uint8")],
    "the smaller": lambda x, i, j: x[: T.minimum(i, j)],
}


@pytest.mark.parametrize("name", SLICES)
def test_slices_by_integer_inputs_equal_fast_compile(name, x, i):
    j = T.lscalar("j")
    compare_modes([i, j], SLICES[name](x, i, j), (1, 3), (0, 1), (2, 2), (3, 30), on_unused_input="ignore")


def test_small_integers_overflow_as_in_fast_compile():
    x, i = theano.shared(np.arange(1000.0)), T.bscalar("i")
    compare_modes([i], x[i * 100 : (i + 1) * 100], *[(np.int8(value),) for value in (0, 1, 2, 5)])


def test_lengths_of_a_split_are_checked():
    x, n = T.dmatrix("x"), T.lscalar("n")
    first, second = T.split(x, T.stack([n, n]), 2)
    f = compare_modes([x, n], first + second, (X[:24], 12))
    for array, length in ((X, 12), (X[:24], 13), (X[:0], -1)):
        with pytest.raises(ValueError, match="split: expected 2 lengths"):
            f(array, length)


def test_constants_are_put_at_indexes():
    x, k = T.dvector("x"), T.lvector("k")
    for update in (T.inc_subtensor(x[k], 1), T.set_subtensor(x[k], 2.0)):
        compare_modes([x, k], update, (np.zeros(4), [1, 3, 1]))


@pytest.mark.parametrize("bounds", [(-3, 2), (-30, 3), (24, 40), (30, 40), (-3, -1), (3, 1)])
def test_slices_beyond_either_end_equal_fast_compile(bounds, x, i):
    j = T.lscalar("j")
    compare_modes([i, j], x[i:j], bounds)
    compare_modes([i, j], x[i:j:-1], bounds)
    compare_modes([i, j], T.set_subtensor(x[i:j], -1.0), bounds)


CONDITIONS = {
    "not": lambda n: ~T.gt(n, 3),
    "not equal": lambda n: ~T.eq(n, 3) & T.gt(n, 1),
    "or": lambda n: ~(T.gt(n, 3) | T.lt(n, 1)),
}


@pytest.mark.parametrize("name", CONDITIONS)
def test_lengths_by_conditions_equal_fast_compile(name, x, i):
    v = T.dvector("v")
    for n, inputs, values in ((i, [i], range(6)), (v.shape[0], [v], [np.ones(k) for k in range(6)])):
        compare_modes(inputs, x[: T.switch(CONDITIONS[name](n), 2, 5)], *[(value,) for value in values])


@pytest.mark.parametrize("update", [T.set_subtensor, T.inc_subtensor])
def test_subtensor_updates_by_slices_equal_fast_compile(update, x, i):
    j = T.lscalar("j")
    values = theano.shared(np.arange(12.0).reshape(2, 6))
    compare_modes([i], update(x[i * 2 : (i + 1) * 2], values), (0,), (5,))
    compare_modes([i, j], update(x[i:j:2, 1:j], 3.0), (0, 4), (1, 3))
    compare_modes([i, j], update(x[i:j, [0, 2]], 3.0), (0, 4), (1, 3))
    compare_modes([i, j], T.grad((x[i:j] ** 2).sum() + x[j:].sum(), x), (0, 4), (1, 3))


LENGTHS = {
    "count": lambda n: T.arange(n),
    "count between": lambda n: T.arange(1, n + 1, 2),
    "zeros": lambda n: T.zeros((n, 2)),
    "ones like a slice": lambda n: T.ones_like(theano.shared(X)[:n]),
    "alloc": lambda n: T.alloc(1.5, n, n),
    "eye": lambda n: T.eye(n),
    "reshape": lambda n: T.arange(12).reshape((n, -1)),
    "reshape by division": lambda n: T.arange(12).reshape((12 // n, n)),
    "tile": lambda n: T.tile(T.arange(n), 2),
    "loop": lambda n: theano.scan(lambda a: a * 2, outputs_info=T.constant(1.0), n_steps=n)[0],
    "last of a loop": lambda n: theano.scan(lambda a: a * 2, outputs_info=T.constant(1.0), n_steps=n)[0][-1],
    "loop over": lambda n: theano.scan(lambda k: k * 2, sequences=T.arange(n))[0],
    "loop without states": lambda n: theano.scan(lambda: T.constant(2.0), n_steps=n)[0],
}


@pytest.mark.parametrize("name", LENGTHS)
def test_integer_inputs_as_lengths_equal_fast_compile(name):
    n = T.iscalar("n")
    compare_modes([n], LENGTHS[name](n), (3,), (4,), (1,))


def test_gradient_of_a_scan_of_symbolic_length_equals_fast_compile():
    a, k = T.dvector("a"), T.iscalar("k")
    result, updates = theano.scan(lambda p, a: p * a, outputs_info=T.ones_like(a), non_sequences=a, n_steps=k)
    compare_modes([a, k], T.grad(result[-1].sum(), a), ([1.0, 2], 3), ([2.0, 3, 4], 5), updates=updates)


def test_random_draws_have_the_shape_of_selected_rows(x, i):
    rows, random = T.dmatrix("rows"), RandomStreams(1)
    n = T.iscalar("n")
    mask = random.binomial(size=rows.shape, p=0.5, dtype="float64")
    f = compile_function([i], [mask, rows], givens={rows: x[i * 10 : (i + 1) * 10]})
    for index, length in ((0, 10), (1, 10), (2, 5)):
        drawn, selected_rows = f(index)
        np.testing.assert_array_equal(selected_rows, X[index * 10 : (index + 1) * 10])
        assert drawn.shape == (length, 6) and set(np.unique(drawn)) == {0, 1}
    assert compile_function([n], random.normal(size=(n, 3)))(4).shape == (4, 3)
    assert compile_function([n], random.uniform(size=(n * 2,)))(4).shape == (8,)


def test_shared_counter_selects_rows_by_length(x):
    for dtype in ("int64", "int32"):
        counter = theano.shared(np.asarray(0, dtype), "counter")
        f = compile_function([], x[counter * 10 : (counter + 1) * 10], updates=[(counter, counter + 1)])
        for part in (X[:10], X[10:20], X[20:], X[30:]):
            np.testing.assert_array_equal(f(), part)


def test_offset_in_an_array_selects_rows(x):
    place = T.lvector("place")
    start = place[0] * 2
    rows = x[start : start + 3]
    f, g = compile_function([place], rows), compile_function([place], T.grad((rows**2).sum(), x))
    np.testing.assert_array_equal(f([4]), X[8:11])
    np.testing.assert_array_equal(f([-4]), X[-8:-5])
    expected = np.zeros_like(X)
    expected[8:11] = 2 * X[8:11]
    np.testing.assert_array_equal(g([4]), expected)
    for beyond in (12, 13, -1, -13):
        # There are no three rows, and XLA knows no other length.
        assert f([beyond]).shape == (3, 6) and np.isnan(f([beyond])).all()
        assert np.isnan(g([beyond])).all()
    integers = theano.shared(np.arange(25, dtype="int16"))[start : start + 3]
    assert (compile_function([place], integers)([12]) == np.iinfo("int16").min).all()


def test_shape_of_a_crop_is_known(x):
    place = T.lvector("place")
    rows = x[place[0] : place[0] + 3].flatten(1)
    draws = RandomStreams(1).uniform(size=rows.shape)
    f = compile_function([place], [rows.shape, rows * T.gt(draws, -1)])
    for start in (0, 5):
        shape, crop = f([start])
        assert shape.tolist() == [18] and crop.tolist() == X[start : start + 3].ravel().tolist()
    assert np.isnan(f([len(X) - 2])[1]).all()
    # At the end there are fewer rows where that can be known: from an integer, or from another array's shape.
    n = T.lscalar("n")
    other = T.lvector("other")
    for start, argument in ((n, len(X) - 2), (other.shape[0], np.zeros(len(X) - 2, "int64"))):
        assert compile_function([n if start is n else other], x[start : start + 3].shape)(argument).tolist() == [2, 6]


def test_offset_computed_by_a_scan_selects_rows(x):
    def step(place, x):
        return place + 2, x[place : place + 2].sum(axis=0)

    (_, sums), _ = theano.scan(step, outputs_info=[T.constant(1, dtype="int64"), None], non_sequences=x, n_steps=5)
    np.testing.assert_allclose(compile_function([], sums)(), X[1:11].reshape(5, 2, 6).sum(axis=1))


def test_index_of_a_scan_selects_rows(x):
    weights = theano.shared(np.arange(12.0).reshape(2, 6))

    def window(t, x):
        return (x[2 * t : 2 * (t + 1)] * weights).sum()

    n, places = T.lscalar("n"), T.lvector("places")
    for sequence, inputs, values in (
        (T.arange(12), [], []),
        (T.arange(n), [n], [12]),
        (places, [places], [[3, 0, 11, 11]]),
        (places - 1, [places], [[3, 1, 5]]),
    ):
        sums, _ = theano.scan(window, sequence, non_sequences=x)
        compare_modes(inputs, sums, values)
        compare_modes(inputs, T.grad((sums**2).sum(), x), values)
    sums, _ = theano.scan(window, T.arange(14), non_sequences=x)
    beyond = compile_function([], sums)()
    assert np.isfinite(beyond[:12]).all() and np.isnan(beyond[12:]).all()
    lengths, _ = theano.scan(lambda t, x: x[t : 2 * t].sum(), T.arange(12), non_sequences=x)
    with pytest.raises(NotImplementedError, match="length of a slice depends on the values of arrays"):
        compile_function([], lengths)()
    windows, _ = theano.scan(lambda t, x: x[t + T.arange(3)].sum(axis=0), T.arange(23), non_sequences=x)
    np.testing.assert_allclose(compile_function([], windows)(), X[:-2] + X[1:-1] + X[2:])


def test_length_from_outside_a_scan_selects_columns(x):
    # Recurrent layers of dl4mt and its descendants: the width of a gate is a parameter's length.
    def step(gates, state, width):
        return gates[width : 2 * width] + state * gates[0 * width : width]

    weights = theano.shared(np.ones((3, 3)))
    states, _ = theano.scan(step, sequences=x, outputs_info=T.zeros((3,)), non_sequences=weights.shape[1])
    compare_modes([], states, [])
    compare_modes([], T.grad((states**2).sum(), x), [])


@pytest.mark.parametrize(
    "graph",
    [
        lambda x: x[: x.argmax()],
        lambda x: T.arange(T.cast(x.sum(), "int64")),
        lambda x: T.zeros((T.cast(x.sum(), "int64"), 2)),
        lambda x: RandomStreams(1).uniform(size=(T.cast(x.sum(), "int64"),)),
        lambda x: x.reshape((T.cast(x[0], "int64"), 2)),
        lambda x: theano.scan(lambda a: a * 2, outputs_info=T.constant(1.0), n_steps=T.cast(x[0], "int64"))[0],
        lambda x: T.extra_ops.Unique()(x),
        lambda x: x.nonzero()[0],
        lambda x: T.nnet.confusion_matrix(T.cast(x, "int64"), T.cast(x, "int64"))[0],
        lambda x: T.repeat(x, T.cast(x, "int64")),
        lambda x: T.bartlett(T.cast(x.sum(), "int64")),
    ],
)
def test_data_dependent_length_is_refused_in_jax(graph):
    x = T.dvector("x")
    with pytest.raises(NotImplementedError, match=r"XLA compiles for fixed shapes(.|\n)*single integers.*another mode"):
        compile_function([x], graph(x))(np.ones(4))


def test_lengths_of_repeats_and_windows_follow_from_inputs():
    n, x = T.lscalar("n"), T.dmatrix("x")
    np.testing.assert_allclose(compile_function([n], T.bartlett(n))(5), np.bartlett(5))
    rows = compile_function([x], T.repeat(x, T.stack([x.shape[1]] * 2), axis=0))
    np.testing.assert_array_equal(rows(X[:2]), np.repeat(X[:2], X.shape[1], axis=0))
    counts = np.arange(100) % 3  # more counts than a shape has lengths
    np.testing.assert_array_equal(
        compile_function([], T.repeat(T.arange(100), counts))(), np.repeat(range(100), counts)
    )


@pytest.mark.parametrize("graph", [T.j0, T.j1, theano.printing.Print("x")])
def test_ops_that_jax_lacks_are_refused_by_name(graph):
    x = T.dvector("x")
    with pytest.raises(NotImplementedError, match=r"JAX mode can't compute (j0|j1|Print.*): use another mode"):
        compile_function([x], graph(x))


def test_eval_and_jax_mode_by_name_select_rows(x):
    i = T.lscalar("i")
    rows = x[i : i + 2]
    np.testing.assert_array_equal(rows.eval({i: 3}, mode="JAX"), X[3:5])
    np.testing.assert_array_equal(theano.function([i], rows, mode=theano.compile.get_mode("JAX"))(3), X[3:5])
