"""Outputs of functions: every op for any rows and ranks, dtypes, large outputs, kinds of graphs."""

import sys

import numpy as np
import pytest
from batches import draw_batch
from function_cases import RNG, CountFunctions, X, assert_close
from hypothesis import example, given
from hypothesis import strategies as st
from library import (
    INTERPRETED,
    NAME,
    XLA,
    Apply,
    PythonOp,
    function,
    is_array,
    limit_examples,
    package,
    read_results,
    shared,
)
from library import tensor as T
from messages import raises
from system import time_limit

import synkhronos as synk
from synkhronos import ranks
from synkhronos.engines.outputs import MAX_SMALL_NBYTES
from synkhronos.functions import get_dispatcher
from synkhronos.graph_libraries import get_library
from synkhronos.graph_libraries.library import CompileOrder
from synkhronos.ranks import Command
from synkhronos.ranks.control_memory import SCRATCH_NBYTES

pytestmark = pytest.mark.usefixtures("rewrites")


def split_rows(rows, n):
    """Return the rows of each rank, without the ranks that have none."""
    return [part for part in np.array_split(np.asarray(rows), n) if len(part)]


# -- any rows, any number of ranks -----------------------------------------------------------------------------


@st.composite
def draw_call(draw, most=60):
    """Draw a number of rows, a batch of them and its NumPy index, a number of slices, and the inputs passed as Data."""
    length = draw(st.integers(0, 12) | st.integers(0, most) | st.sampled_from([0, 1, 299]))
    return (
        length,
        *draw(draw_batch(length)),
        draw(st.sampled_from([1, 1, 2, 3, 7])),
        draw(st.tuples(st.booleans(), st.booleans(), st.booleans())),
    )


def average_slices(plain, rows, n, slices, *args):
    """Return the average over ranks of the means over slices, weighted by rows."""
    averages = []
    for part in split_rows(rows, n):
        pieces = split_rows(part, min(slices, len(part)))
        values = [plain(*(a[piece] for a in args)) for piece in pieces]
        averages.append(np.average(values, axis=0, weights=list(map(len, pieces))))
    return np.mean(averages, axis=0) if averages else plain(*(a[rows] for a in args))


class Many:
    """A function of two scattered inputs and a broadcast one, with outputs of 0 to 3 dimensions under all ops."""

    def __init__(self, prefix):
        x, y, b = T.dmatrix("x"), T.lvector("y"), T.drow("b")
        all_rows = T.concatenate([x, b])  # a minimum exists even without rows
        wide = x.dimshuffle(0, 1, "x") * b.dimshuffle("x", 0, 1)
        self.exact = [
            ((x * b).sum(axis=0), "sum"),
            (x.sum(), "sum"),
            (y.sum(), "sum"),
            ((1 + x / 100).prod(axis=0), "prod"),
            (all_rows.min(axis=0), "min"),
            (all_rows.max(), "max"),
            (x.mean(axis=0), "mean"),
            ((x.sum(axis=1) * y).mean(), "mean"),
            (x * 2 + y.dimshuffle(0, "x"), "gather"),
            (y, "gather"),
            (wide, "gather"),
        ]
        average = x.sum(axis=0) * b[0]
        outputs = [(v, f"{prefix}{op}") for v, op in self.exact] + [(average, f"{prefix}avg"), average]
        self.synk = synk.function([x, y], outputs, bcast_inputs=[b])
        self.serial = function([x, y, b], [v for v, _ in self.exact])
        self.average = function([x, y, b], average, on_unused_input="ignore")


@pytest.mark.parametrize("n, prefix", [(1, ""), (2, "c_"), (3, ""), (4, "")])
def test_exact_ops_equal_the_serial_function(fork, n, prefix):
    fork(n)
    many = Many(prefix)
    b = np.array([[1.0, -2.0, 0.5]])
    every_x, every_y = RNG.normal(size=(300, 3)), RNG.integers(-9, 9, 300)

    @limit_examples(30)
    @given(draw_call())
    @example((0, None, slice(None), 1, (False, True, True)))
    @example((299, slice(None, None, -3), slice(None, None, -3), 3, (True, False, False)))
    def check(call):
        length, batch, index, slices, kinds = call
        x, y = every_x[:length], every_y[:length]
        x_in, y_in, b_in = (synk.data(v) if k else v for v, k in zip((x, y, b), kinds, strict=True))
        results = many.synk(x_in, y_in, b_in, batch=batch, num_slices=slices)
        rows = np.arange(length)[index]
        with np.errstate(invalid="ignore", divide="ignore"):
            expected = many.serial(x[rows], y[rows], b)
            average = average_slices(lambda *args: many.average(*args, b), rows, n, slices, x, y)
        for result, value in zip(results, expected, strict=False):
            assert_close(result, value)
        assert_close(results[-1], average)
        assert_close(results[-2], average)

    check()


def test_default_op_with_num_slices_equals_no_slices(two_ranks_per_test):
    x = T.dvector("x")
    for outputs in ([x.mean()], [x.mean(), (x, "gather")]):  # scalars alone take another code path
        f = synk.function([x], outputs)
        for slices in (1, 2, 3):
            assert_close(f(np.arange(10.0) ** 2, num_slices=slices)[0], np.asarray(28.5))


class WithoutDtype(PythonOp):
    """Op that returns integers where all numbers are whole, although it declares floats."""

    def compute(self, x):
        return np.array([int(v) if v == int(v) else v for v in x.tolist()])


@pytest.mark.skipif(XLA, reason="XLA's values have the dtypes of the graph")
@pytest.mark.parametrize("op", ["gather", "sum"])
@pytest.mark.parametrize("n_items", [3, MAX_SMALL_NBYTES])
def test_other_dtypes_on_some_ranks_are_refused(op, n_items, two_ranks_per_test):
    x = T.dvector("x")
    f = synk.function([x], (WithoutDtype()(x), op), mode=INTERPRETED)
    for first, second in ((0.5, 3.0), (3.0, 0.5)):
        with raises(TypeError, "output 0"):
            f(np.repeat([first, second], n_items))
    assert f(np.repeat([0.5, 3.5], n_items))[0] == (0.5 if op == "gather" else 4)


class DeclareInteger(PythonOp):
    """Op that returns half the first number, although it declares an integer."""

    def make_node(self, x):
        return Apply(self, [x], [T.lscalar()])

    def compute(self, x):
        return np.asarray(x[0] / 2)


@pytest.mark.skipif(XLA, reason="XLA's values have the dtypes of the graph")
@pytest.mark.parametrize("n", [2, 5])
@pytest.mark.parametrize("op", ["gather", "sum"])
def test_scalars_of_other_dtypes_do_not_change(fork, n, op):
    fork(n)
    x = T.dvector("x")
    f = synk.function([x], (DeclareInteger()(x), op), mode=INTERPRETED)
    with pytest.raises(TypeError, match="^output 0 of rank 0: can't cast float64 to int64 without changing 0.5"):
        f(np.ones(n))
    assert f(np.full(n, 4.0)).tolist() == ([2] * n if op == "gather" else 2 * n)


@pytest.mark.skipif(XLA, reason="XLA's results are read-only, as its arrays are")
def test_gathered_scalar_of_one_rank_is_writable(fork):
    fork(3)
    s = shared(np.arange(5.0), "s")
    f = synk.function([], (s.sum(), "gather"), sliceable_shareds=[s])
    assert f(batch_s=[[], [2], []]).flags.writeable


@pytest.mark.parametrize("n", [2, 3])
def test_scalar_outputs_are_reduced(fork, n):
    # Functions with scalar outputs only take another code path.
    fork(n)
    x = T.dvector("x")
    exact = [(x.sum(), "sum"), (x.mean(), "mean"), ((x + 0.5).prod(), "prod"), (x.shape[0], "sum")]
    f = synk.function([x], [*exact, x.mean(), (x.sum(), "gather"), (x.sum(), None)])
    serial, mean = function([x], [v for v, _ in exact]), function([x], x.mean())
    values = RNG.normal(size=300)

    @limit_examples(30)
    @given(draw_call())
    def check(call):
        length, batch, index, slices, _ = call
        results = f(values[:length], batch=batch, num_slices=slices)
        rows = np.arange(length)[index]
        with np.errstate(invalid="ignore", divide="ignore"):
            for result, value in zip(results, serial(values[rows]), strict=False):
                assert_close(result, value)
            assert_close(results[4], average_slices(mean, rows, n, slices, values))
        if len(rows) and slices == 1:
            parts = [values[part].sum() for part in split_rows(rows, n)]
            assert_close(results[5], np.array(parts))
            assert_close(results[6], np.asarray(parts[0]))

    check()


def test_op_none_returns_the_masters_own_value(fork):
    fork(3, master_rank=1)
    x = T.dvector("x")
    f = synk.function([x], [(x, None), (x.sum(), None)])
    master_value, total = f(np.arange(7.0))
    np.testing.assert_array_equal(master_value, [3, 4])  # 3, 2 and 2 rows
    assert total == 7


@pytest.mark.parametrize("master", [0, 1, 2])
def test_gather_concatenates_in_rank_order(fork, master):
    fork(3, master_rank=master)
    x = T.dvector("x")
    f = synk.function([x], [(x, "gather"), (x.sum(), "gather")])
    joined, sums = f(np.arange(7.0))
    np.testing.assert_array_equal(joined, np.arange(7.0))
    np.testing.assert_array_equal(sums, [3, 7, 11])
    # With one row only rank 0 computes, whether it is the master or not.
    np.testing.assert_array_equal(f(np.arange(1.0) + 4)[1], [4])


def test_elementwise_ops_refuse_shapes_that_differ_between_ranks(fork):
    fork(3)
    x = T.dmatrix("x")
    f = synk.function([x], [(x, "sum")])
    assert f(np.ones((6, 2)))[0].shape == (2, 2)
    with raises(ValueError, "sum"):
        read_results(f(np.ones((7, 2))))
    assert f(np.ones((6, 2)))[0].shape == (2, 2)


def test_gather_refuses_mismatched_shapes(two_ranks_per_test):
    x = T.dvector("x")
    f = synk.function([x], (T.zeros((2, x.shape[0])), "gather"))
    with raises(ValueError, "gather"):
        read_results(f(np.ones(3)))
    assert f(np.ones(4)).shape == (4, 2)


# -- dtypes and sizes ------------------------------------------------------------------------------------------


OF_TWO = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}


@pytest.fixture(scope="module")
def two_parts():
    """Give rows whose halves are the shares of two ranks."""
    return np.array([[3, 1, 0], [2, 7, 1], [5, 1, 1], [1, 0, 4]])


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int8", "int32", "int64", "uint8", "bool"])
def test_outputs_keep_their_dtype(two_parts, dtype, two_ranks_per_test):
    x = T.matrix("x", dtype=dtype)
    binary_ufuncs = {op: ufunc for op, ufunc in OF_TWO.items() if (op, dtype) != ("sum", "bool")}
    f = synk.function([x], [(x, op) for op in [*binary_ufuncs, "gather", None]])
    value = two_parts.astype(dtype)
    results = f(value)
    for ufunc, result in zip(binary_ufuncs.values(), results, strict=False):
        np.testing.assert_array_equal(result, ufunc(value[:2], value[2:]))
    np.testing.assert_array_equal(results[-2], value)
    np.testing.assert_array_equal(results[-1], value[:2])
    assert {result.dtype for result in results} == {np.dtype(dtype)}


@pytest.mark.parametrize("dtype", ["float16", "float32", "complex128"])
def test_avg_keeps_float_dtypes(two_parts, dtype, two_ranks_per_test):
    x = T.matrix("x", dtype=dtype)
    for result in synk.function([x], [x, (x, "mean")])(two_parts.astype(dtype)):
        np.testing.assert_array_equal(result, (two_parts[:2] + two_parts[2:]) / 2)
        assert result.dtype == dtype


@pytest.mark.parametrize("op", ["avg", "mean", "c_avg", "c_mean"])
@pytest.mark.parametrize("dtype", ["int32", "uint8", "bool"])
def test_function_refuses_avg_of_integers(fork, op, dtype):
    fork(1)
    x = T.vector("x", dtype=dtype)
    with pytest.raises(ValueError, match=rf"outputs: op '{op}' of output 0 is not defined for dtype {dtype}"):
        synk.function([x], [(x, op)])


@pytest.mark.parametrize("op", ["sum", "c_sum"])
def test_function_refuses_sum_of_booleans(op, two_ranks_per_test):
    x = T.dvector("x")
    positive = T.gt(x, 0)
    with raises(ValueError, "outputs"):
        synk.function([x], (positive.any(), op))
    value = np.array([1.0, 2.0, -1.0, -2.0])
    most, least, count = synk.function(
        [x], [(positive.any(), "max"), (positive.any(), "min"), (T.cast(positive, "int64").sum(), op)]
    )(value)
    assert (bool(most), bool(least), int(count)) == (True, False, 2)
    # Slices accumulate by the same op.
    flag = shared(np.zeros(2, bool), "flag")
    f = synk.function([x], [], updates=[(flag, T.gt(x[:2], 0), op)])
    with raises(ValueError, "num_slices"):
        f(value, num_slices=2)
    with raises(ValueError, "op"):
        synk.all_reduce(flag, "sum")


@pytest.mark.parametrize("dtype", ["float64", "float16", "int8"])
def test_large_outputs_are_streamed_in_chunks(fork, dtype):
    fork(3)
    x = T.matrix("x", dtype=dtype)
    column = x[0]
    ops = ["sum", "min", "max", "prod"] + (["avg", "mean"] if dtype != "int8" else [])
    f = synk.function([x], [*((column, op) for op in ops), (x, "gather"), (x, None)])
    width = 5 * SCRATCH_NBYTES // 2 // np.dtype(dtype).itemsize + 1
    value = RNG.integers(-3, 4, size=(5, width)).astype(dtype)
    for n_rows in (2, 5):  # the third rank has none of the two rows
        rows = value[:n_rows]
        firsts = np.stack([part[0] for part in split_rows(rows, 3)])
        *results, joined, master_value = f(rows)
        expected = {
            "sum": firsts.sum(axis=0, dtype=dtype),
            "prod": firsts.prod(axis=0, dtype=dtype),
            "min": firsts.min(axis=0),
            "max": firsts.max(axis=0),
        }
        if dtype != "int8":
            weights = [len(part) for part in split_rows(rows, 3)]
            expected["avg"] = firsts.mean(axis=0, dtype="float32").astype(dtype)
            expected["mean"] = np.average(firsts.astype("float32"), axis=0, weights=weights).astype(dtype)
        for op, result in zip(ops, results, strict=True):
            np.testing.assert_allclose(result, expected[op], rtol=1e-3 if dtype == "float16" else 1e-6)
            assert result.dtype == dtype
        np.testing.assert_array_equal(joined, rows)
        np.testing.assert_array_equal(master_value, split_rows(rows, 3)[0])


def test_gather_mixes_streamed_and_small_parts(two_ranks_per_test):
    x = T.dvector("x")
    f = synk.function([x], (x, "gather"))
    limit = MAX_SMALL_NBYTES // 4  # 8 bytes each, half on each rank
    for length in (limit - 1, limit, limit + 1):
        value = RNG.normal(size=length)
        np.testing.assert_array_equal(f(value), value)


# -- the shape of the answer -----------------------------------------------------------------------------------


def test_list_of_outputs_returns_a_list(two_ranks_per_test):
    x = T.dvector("x")
    total = x.sum()
    ones = np.ones(4)
    assert is_array(synk.function([x], total)(ones))
    assert is_array(synk.function([x], (total, "sum"))(ones))
    for outputs in ([total], [(total, "sum")]):
        (result,) = synk.function([x], outputs)(ones)
        assert is_array(result) and result.shape == ()
    assert len(synk.function([x], (total, total + 1))(ones)) == 2


def test_function_without_outputs_returns_like_serial(two_ranks_per_test):
    x = T.dvector("x")
    total = shared(0.0, "total")
    for outputs in (None, []):
        f = synk.function([x], outputs, updates=[(total, total + x.sum())])
        assert f(np.ones(4)) == function([x], outputs, on_unused_input="ignore")(np.ones(4))
    np.testing.assert_array_equal(synk.gather(total), [4, 4])  # two calls of two rows each


@pytest.mark.parametrize("ndim", [0, 1])
def test_output_subset_keeps_the_requested_order(ndim, two_ranks_per_test):
    x, y = T.dvectors("x", "y")
    outputs = [(x.sum(), "sum"), (y.max(), "max"), (x.min(), "min"), (y, "gather" if ndim else None)]
    f = synk.function([x, y], outputs[: 3 + ndim])
    a, b = np.arange(4.0), np.arange(4.0) + 10
    assert [float(v) for v in f(a, b, output_subset=[2, 1])] == [0, 13]
    # Inputs that no output of the subset needs must be passed, too.
    assert [float(v) for v in f(a, b, output_subset=[0])] == [6]
    assert [float(v) for v in f(a, b, output_subset=[0], num_slices=2)] == [6]
    assert f(a, b, output_subset=[]) == []
    assert len(f(a, b)) == 3 + ndim


def test_output_subset_applies_all_updates(two_ranks_per_test):
    x = T.dvector("x")
    count = shared(0.0, "count")
    f = synk.function([x], [(x.sum(), "sum"), (x.max(), "max")], updates=[(count, count + 1)])
    f(np.ones(4), output_subset=[1])
    f(np.ones(4), output_subset=[])
    f(np.ones(4), output_subset=[0], num_slices=2)
    np.testing.assert_array_equal(synk.gather(count), [3, 3])


def test_function_repr_shows_its_name_and_inputs(fork):
    fork(1)
    x = T.dvector("x")
    w, v = shared(0.0, "w"), shared(0.0, "v")
    f = synk.function([x], [x, (x, "c_sum"), (x, None)], updates=[(w, x.sum()), (v, x.sum(), "max")], name="train")
    assert f.name == "train"
    assert f.output_modes == ["avg", "c_sum", None]
    assert f.update_modes == ["avg", "max"]
    assert "train" in repr(f) and "x" in repr(f)
    assert isinstance(synk.function([x], x).name, str)
    assert synk.function([x], x).output_modes == ["avg"]


# -- many kinds of functions -----------------------------------------------------------------------------------


def test_function_without_inputs_runs_on_every_rank(fork):
    fork(3)
    w = shared(np.array([1.0, 2.0]), "w")
    f = synk.function([], [(w.sum(), "sum"), (w, "gather"), w])
    total, joined, average = f()
    assert total == 9
    np.testing.assert_array_equal(joined, [1, 2] * 3)
    np.testing.assert_array_equal(average, [1, 2])


def test_function_accepts_only_bcast_inputs(fork):
    fork(3)
    b = T.dvector("b")
    f = synk.function([], [(b.sum(), "sum"), (b.sum(), "mean")], bcast_inputs=[b])
    total, mean = f(np.ones(2))
    assert (total, mean) == (6, 2)


@pytest.mark.skipif(XLA, reason="PyTensor's JAX mode has no generators as outputs")
def test_op_none_returns_outputs_that_are_no_arrays(two_ranks_per_test):
    x = T.dvector("x")
    if NAME == "pytensor":
        rng = shared(np.random.default_rng(1), "rng")
        other = T.random.normal(rng=rng).owner.outputs[0]
    else:
        other = T.shared_randomstreams.RandomStreams(1).normal(size=(1,)).owner.outputs[0]
    for value, op in ((x.sum(), "sum"), (x, "gather")):
        state, result = synk.function([x], [(other, None), (value, op)])(np.arange(4.0))
        assert type(state).__module__.startswith("numpy.random")
        np.testing.assert_array_equal(result, np.arange(4.0) if op == "gather" else 6)


def test_scan_runs_on_every_rank(two_ranks_per_test):
    x, steps = T.dmatrix("x"), T.iscalar("steps")
    w = shared(np.array([2.0, 3.0]), "w")
    if NAME == "pytensor":
        powers = package.scan(
            lambda a, w: a * w, outputs_info=[x], non_sequences=[w], n_steps=steps, return_updates=False
        )
    else:
        powers, _ = package.scan(lambda a, w: a * w, outputs_info=[x], non_sequences=[w], n_steps=steps)
    # XLA needs the number of steps at compilation.
    f = synk.function([x], (powers[-1], "gather"), bcast_inputs=[steps], sliceable_shareds=[], mode=INTERPRETED)
    np.testing.assert_allclose(f(X, 3), X * [8, 27])
    np.testing.assert_allclose(f(X, 2, num_slices=2), X * [4, 9])


def test_scan_over_sliceable_shareds_is_sliced(two_ranks_per_test):
    s = shared(np.arange(6.0), "s")
    if NAME == "pytensor":
        running = package.scan(lambda a, t: t + a, s, outputs_info=[T.as_tensor(np.float64(0))], return_updates=False)
    else:
        running, _ = package.scan(lambda a, t: t + a, s, outputs_info=[T.constant(np.float64(0))])
    f = synk.function([], (running, "gather"), sliceable_shareds=[s])
    np.testing.assert_array_equal(f(batch_s=[slice(0, 3), slice(3, 6)]), [0, 1, 3, 3, 7, 12])


def add_ones(x, length):
    for _ in range(length):
        x = x + 1.0
    return x


def test_deep_graph_is_sent_to_workers(two_ranks_per_test):
    # Pickle follows references recursively, and 3000 are more than Python allows.
    x = T.dvector("x")
    f = synk.function([x], (add_ones(x, 3000), "gather"))
    synk.distribute()
    assert all(size == 1 for size in ranks.get_session().run(CountFunctions()))
    assert f.name


def test_deep_graph_is_computed(two_ranks_per_test):
    # The libraries' compilers are recursive: users of such graphs raise the limit, before or after fork().
    x = T.dvector("x")
    f = synk.function([x], (add_ones(x, 1200), "gather"))
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(10_000)
    try:
        np.testing.assert_array_equal(f(np.arange(4.0)), np.arange(4.0) + 1200)
    finally:
        sys.setrecursionlimit(limit)


@pytest.mark.parametrize(("n_rows", "sums"), [(1, [2, 0]), (4, [4, 4])])
def test_first_call_is_ordered_on_all_ranks_if_one_writes_the_disk_cache(monkeypatch, n_rows, sums, two_ranks_per_test):
    # In the master alone, as after a change of PyTensor's setting numba__cache.
    library = type(get_library(T.dvector()))
    monkeypatch.setattr(library, "writes_cache_at_first_call", lambda self, function: True)
    x, w = T.dvector("x"), shared(0.0, "w")
    f = synk.function([x], (x.sum(), "sum"), updates=[(w, w + x.sum())])
    for _ in range(2):
        with time_limit():
            assert f(np.ones(n_rows)) == n_rows
    np.testing.assert_array_equal(synk.gather(w), sums)


@pytest.mark.parametrize("order", CompileOrder)
def test_first_call_is_ordered_on_all_ranks_if_the_order_of_one_differs(monkeypatch, order, two_ranks_per_test):
    # In the master alone, as after a change of PyTensor's setting linker.
    library = type(get_library(T.dvector()))
    monkeypatch.setattr(library, "choose_compile_order", lambda self, mode: order)
    monkeypatch.setattr(library, "writes_cache_at_first_call", lambda self, function: False)
    x = T.dvector("x")
    f = synk.function([x], (x.sum(), "sum"))
    with time_limit():
        assert [f(np.ones(n)) for n in (4, 1)] == [4, 1]


class GetLinkers(Command):
    """Command that returns the linker by which each rank has compiled a function."""

    def __init__(self, key):
        self.key = key

    def run(self, rank):
        (compiled,) = rank.get_object(self.key).compiled_variants.values()
        return rank.all_gather(type(compiled.function.maker.linker).__name__)


def test_the_masters_setting_of_the_linker_is_that_of_all_ranks(monkeypatch, two_ranks_per_test):
    x = T.dvector("x")
    with monkeypatch.context() as patch:
        patch.setattr(package.config, "linker", "vm")  # after the fork
        f = synk.function([x], (x.sum(), "sum"), mode="Mode")
    assert f(np.ones(4)) == 4
    linker = type(package.compile.mode.predefined_linkers["vm"]).__name__
    assert ranks.get_session().run(GetLinkers(get_dispatcher(f).computation_key)) == [linker] * 2


def test_functions_share_variables(two_ranks_per_test):
    x = T.dvector("x")
    w = shared(0.0, "w")
    add = synk.function([x], updates=[(w, w + x.sum())])
    read = synk.function([], (w, "gather"))
    add(np.arange(4.0))
    np.testing.assert_array_equal(read(), [1, 5])
    late = synk.function([], (w * 2, "gather"))  # made after the ranks' values differ
    np.testing.assert_array_equal(late(), [2, 10])


def test_synk_function_may_take_the_place_of_the_librarys_function(monkeypatch, two_ranks_per_test):
    monkeypatch.setattr(package, "function", synk.function)
    x = T.dvector("x")
    f = package.function([x], (x.sum(), "sum"), name="total")
    assert f(np.ones(4)) == 4
    library = type(get_library(x))(package)  # as it is created if the script replaces the function before `fork`
    assert library.function([x], x.sum())(np.ones(4)) == 4
