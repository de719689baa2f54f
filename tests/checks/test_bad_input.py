"""Wrong arguments raise errors that name the argument, the expected and the given value, and change nothing."""

import numpy as np
import pytest
from library import NAME, fork_ranks, shared
from library import tensor as T
from messages import raises
from system import run_code

import synkhronos as synk
from synkhronos.checks import check_number


class RankObjects:
    """Two ranks with variables, functions and Data; `state` has the values of all of them."""

    def __init__(self):
        self.s = shared(np.array([1.0, 2.0]), "s")
        self.i = shared(np.array([1, 2]), "i")
        self.m = shared(np.zeros((2, 2)), "m")
        self.z = shared(np.array(3.0), "z")
        self.lonely = shared(np.zeros(2), "lonely")
        self.generator = shared(np.random.RandomState(1) if NAME == "theano" else np.random.default_rng(1), "rng")
        self.x, self.y, self.w = T.dmatrix("x"), T.lvector("y"), T.dscalar("w")
        x, y, w = self.x, self.y, self.w
        self.f = synk.function(
            [x, y],
            [(x.sum(), "sum"), (w * y, "gather")],
            bcast_inputs=[w],
            updates=[(self.s, self.s + x.sum(axis=0)), (self.i, self.i + y.sum())],
            name="f",
        )
        self.cut = synk.function(
            [], (self.m.sum(), "sum"), updates=[(self.z, self.z + self.m.sum())], sliceable_shareds=[self.m], name="cut"
        )
        self.probe = synk.function([x], (T.dot(x, self.s).sum(), "sum"), name="probe")
        self.d = synk.data(np.arange(6.0).reshape(3, 2), name="d")
        self.number = synk.data(7.0)
        synk.distribute()
        for r in range(2):
            synk.set_value(
                r,
                [self.s, self.i, self.m, self.z],
                [[1.0 + r, 2.0], [r, 5], np.full((3, 2), float(r)), np.array(float(r))],
            )
        self.state = self.get_values()

    def get_values(self):
        """Return all values that a call could change."""
        values = [*synk.gather([self.s, self.i, self.m, self.z]), self.d.data, self.number.data]
        return [value.tolist() for value in values] + [self.d.alloc_size, self.d.minibatch]

    def check(self):
        """Check that nothing has changed, and that the ranks still compute and communicate."""
        assert self.get_values() == self.state
        # Rank 0 has two rows and [1, 2], rank 1 the third and [2, 2].
        assert self.probe(self.d) == (0 + 1 * 2) + (2 + 3 * 2) + (4 * 2 + 5 * 2)
        assert synk.reduce(self.s, "sum", in_place=False).tolist() == [3.0, 4.0]


@pytest.fixture(scope="module")
def rank_objects(two_ranks):
    """Make the variables and data of two ranks, which each test compares with their first values."""
    return RankObjects()


X, Y = np.ones((3, 2)), np.arange(3)

FORK = {
    "a string": (lambda w: synk.fork("2"), TypeError, "n_parallel"),
    "a float": (lambda w: synk.fork(2.0), TypeError, "n_parallel"),
    "a flag": (lambda w: synk.fork(True), TypeError, "n_parallel"),
    "none at all": (lambda w: synk.fork(0), ValueError, "n_parallel"),
    "less": (lambda w: synk.fork(-1), ValueError, "n_parallel"),
    "by far too many": (lambda w: synk.fork(10**9), ValueError, "n_parallel"),
    "use_gpu a string": (lambda w: synk.fork(2, "no"), TypeError, "use_gpu"),
    "use_gpu a number": (lambda w: synk.fork(2, use_gpu=0), TypeError, "use_gpu"),
    "master too high": (lambda w: synk.fork(2, False, 2), ValueError, "master_rank"),
    "master below 0": (lambda w: synk.fork(2, False, -1), ValueError, "master_rank"),
    "master a float": (lambda w: synk.fork(2, False, 0.0), TypeError, "master_rank"),
    "master None": (lambda w: synk.fork(2, False, None), TypeError, "master_rank"),
    "profile a path": (lambda w: synk.fork(2, False, 0, "prof"), TypeError, "profile_workers"),
}

WHILE_RUNNING = {
    "fork twice": (lambda w: synk.fork(2, use_gpu=False), RuntimeError, ""),
    "close what": (lambda w: synk.close(2), TypeError, "close"),
    "get_n_gpu of what": (lambda w: synk.get_n_gpu(0), TypeError, "get_n_gpu"),
    "distribute what": (lambda w: synk.distribute(w.f), TypeError, "distribute"),
}

FUNCTION = {
    "inputs one variable": (lambda w: synk.function(w.x), TypeError, "inputs"),
    "inputs a dict": (lambda w: synk.function({"x": w.x}), TypeError, "inputs"),
    "inputs numbers": (lambda w: synk.function([3]), TypeError, "inputs"),
    "inputs arrays": (lambda w: synk.function([X]), TypeError, "inputs"),
    "inputs twice": (lambda w: synk.function([w.x, w.x]), ValueError, "inputs"),
    "inputs here and there": (lambda w: synk.function([w.x], bcast_inputs=[w.x]), ValueError, "inputs"),
    "inputs without rows": (lambda w: synk.function([w.w]), ValueError, "inputs"),
    "inputs of one row forever": (lambda w: synk.function([T.row("r")]), ValueError, "inputs"),
    "inputs shared": (lambda w: synk.function([w.s]), TypeError, "inputs"),
    "inputs computed": (lambda w: synk.function([w.x * 2]), ValueError, "inputs"),
    "bcast_inputs one variable": (lambda w: synk.function([], bcast_inputs=w.w), TypeError, "bcast_inputs"),
    "bcast_inputs shared": (lambda w: synk.function([], bcast_inputs=[w.s]), TypeError, "bcast_inputs"),
    "bcast_inputs a number": (lambda w: synk.function([], bcast_inputs=[1.5]), TypeError, "bcast_inputs"),
    "outputs a string": (lambda w: synk.function([w.x], "x"), TypeError, "outputs"),
    "outputs a dict": (lambda w: synk.function([w.x], {"a": w.x}), TypeError, "outputs"),
    "outputs an array": (lambda w: synk.function([w.x], [X]), TypeError, "outputs"),
    "outputs by no such op": (lambda w: synk.function([w.x], (w.x, "median")), ValueError, "outputs"),
    "outputs by a number": (lambda w: synk.function([w.x], [(w.x, 3)]), TypeError, "outputs"),
    "outputs by two ops": (lambda w: synk.function([w.x], [(w.x, "sum", "max")]), TypeError, "outputs"),
    "outputs average of integers": (lambda w: synk.function([w.y], [w.x.sum(), w.y.sum()]), ValueError, "outputs"),
    "outputs mean of integers": (lambda w: synk.function([w.y], (w.y.sum(), "mean")), ValueError, "outputs"),
    "outputs of no inputs": (lambda w: synk.function([w.y], w.x.sum()), ValueError, "outputs"),
    "updates one variable": (lambda w: synk.function([], updates=w.s), TypeError, "updates"),
    "updates a string": (lambda w: synk.function([], updates="s"), TypeError, "updates"),
    "updates of no expression": (lambda w: synk.function([], updates=[(w.s,)]), TypeError, "updates"),
    "updates of no shared variable": (lambda w: synk.function([w.x], updates=[(w.x, w.x + 1)]), TypeError, "updates"),
    "updates by no such op": (lambda w: synk.function([], updates=[(w.s, w.s + 1, "median")]), ValueError, "updates"),
    "updates by a number": (lambda w: synk.function([], updates={w.s: (w.s + 1, 2)}), TypeError, "updates"),
    "updates twice": (lambda w: synk.function([], updates=[(w.s, w.s + 1), (w.s, w.s + 2)]), ValueError, "updates"),
    "updates by a string": (lambda w: synk.function([], updates=[(w.s, "one")]), TypeError, "updates"),
    "updates of other dimensions": (lambda w: synk.function([], updates=[(w.s, w.m)]), TypeError, "updates"),
    "updates of a dtype that loses": (lambda w: synk.function([], updates=[(w.i, w.i * 0.5)]), TypeError, "updates"),
    "updates of no inputs": (lambda w: synk.function([], updates=[(w.s, w.x.sum(axis=0))]), ValueError, "updates"),
    "givens a number": (lambda w: synk.function([w.x], w.x.sum(), givens=3), TypeError, "givens"),
    "givens no pairs": (lambda w: synk.function([w.x], w.x.sum(), givens=[(w.w,)]), TypeError, "givens"),
    "givens of a string": (lambda w: synk.function([w.x], w.x.sum(), givens={"x": w.m}), TypeError, "givens"),
    "givens by a string": (lambda w: synk.function([w.x], w.x.sum() * w.w, givens={w.w: "one"}), TypeError, "givens"),
    "givens one variable": (lambda w: synk.function([w.x], w.x.sum(), givens=w.s), TypeError, "givens"),
    "givens of no inputs": (
        lambda w: synk.function([w.y], w.y.sum() * w.w, givens=[(w.w, w.x.sum())]),
        ValueError,
        "givens",
    ),
    "sliceable one variable": (
        lambda w: synk.function([], w.m.sum(), sliceable_shareds=w.m),
        TypeError,
        "sliceable_shareds",
    ),
    "sliceable not shared": (
        lambda w: synk.function([w.x], w.x.sum(), sliceable_shareds=[w.x]),
        TypeError,
        "sliceable_shareds",
    ),
    "sliceable without rows": (
        lambda w: synk.function([], w.z * 2, sliceable_shareds=[w.z]),
        ValueError,
        "sliceable_shareds",
    ),
    "sliceable twice": (
        lambda w: synk.function([], w.m.sum(), sliceable_shareds=[w.m, w.m]),
        ValueError,
        "sliceable_shareds",
    ),
    "what the library doesn't know": (
        lambda w: synk.function([w.x], w.x.sum(), speed="fast"),
        TypeError,
        "speed",
    ),
    "a name that is none": (lambda w: synk.function([w.x], name=3), TypeError, "name"),
}

CALL = {
    "nothing": (lambda w: w.f(), TypeError, "f"),
    "one missing": (lambda w: w.f(X, Y), TypeError, "f"),
    "too many": (lambda w: w.f(X, Y, 1.0, 2.0), TypeError, ""),
    "no such name": (lambda w: w.f(X, Y, v=1.0), TypeError, "v"),
    "twice": (lambda w: w.f(X, Y, 1.0, w=2.0), TypeError, "f"),
    "None": (lambda w: w.f(None, Y, 1.0), TypeError, "x"),
    "a string": (lambda w: w.f(X, Y, "one"), (TypeError, ValueError), "one"),
    "an array of objects": (lambda w: w.f(X.astype(object), Y, 1.0), TypeError, "x"),
    "another dtype": (lambda w: w.f(X, Y + 0.5, 1.0), TypeError, "y"),
    "other dimensions": (lambda w: w.f(X[0], Y, 1.0), TypeError, "x"),
    "Data of another dtype": (lambda w: w.f(w.d, synk.data([1.0] * 3), 1.0), TypeError, "y"),
    "Data of other dimensions": (lambda w: w.f(synk.data([1.0]), Y, 1.0), TypeError, "x"),
    "rows that differ": (lambda w: w.f(X, Y[:2], 1.0), ValueError, "f"),
    "batch a string": (lambda w: w.f(X, Y, 1.0, batch="2"), TypeError, "batch"),
    "batch a float": (lambda w: w.f(X, Y, 1.0, batch=2.0), TypeError, "batch"),
    "batch a flag": (lambda w: w.f(X, Y, 1.0, batch=True), TypeError, "batch"),
    "batch too many": (lambda w: w.f(X, Y, 1.0, batch=4), IndexError, "batch"),
    "batch below 0": (lambda w: w.f(X, Y, 1.0, batch=-1), IndexError, "batch"),
    "batch index": (lambda w: w.f(X, Y, 1.0, batch=[0, 3]), IndexError, "batch"),
    "batch of Data": (lambda w: w.f(w.d, Y, 1.0, batch=[-4]), IndexError, "batch"),
    "batch of floats": (lambda w: w.f(X, Y, 1.0, batch=[0.5]), TypeError, "batch"),
    "batch of lists": (lambda w: w.f(X, Y, 1.0, batch=[[0]]), ValueError, "batch"),
    "batch mask": (lambda w: w.f(X, Y, 1.0, batch=np.ones(2, bool)), ValueError, "batch"),
    "batch slice": (lambda w: w.f(X, Y, 1.0, batch=slice("a")), TypeError, "batch"),
    "batch standing still": (lambda w: w.f(X, Y, 1.0, batch=slice(0, 3, 0)), ValueError, "batch"),
    "batch of nothing": (lambda w: w.cut(batch=2), ValueError, "batch"),
    "batch_s of nothing": (lambda w: w.f(X, Y, 1.0, batch_s=[0]), ValueError, "batch_s"),
    "batch_s a number": (lambda w: w.cut(batch_s=2), TypeError, "batch_s"),
    "batch_s a string": (lambda w: w.cut(batch_s="2"), TypeError, "batch_s"),
    "batch_s of floats": (lambda w: w.cut(batch_s=[0.5]), TypeError, "batch_s"),
    "batch_s for other ranks": (lambda w: w.cut(batch_s=[[0], [1], [2]]), ValueError, "batch_s"),
    "batch_s index": (lambda w: w.cut(batch_s=[[0], [3]]), IndexError, "batch_s"),
    "batch_s index on all": (lambda w: w.cut(batch_s=[-4]), IndexError, "batch_s"),
    "batch_s slice": (lambda w: w.cut(batch_s=slice("a")), TypeError, "batch_s"),
    "batch_s standing still": (lambda w: w.cut(batch_s=[slice(0, 2, 0)] * 2), ValueError, "batch_s"),
    "no slices": (lambda w: w.f(X, Y, 1.0, num_slices=0), ValueError, "num_slices"),
    "half a slice": (lambda w: w.f(X, Y, 1.0, num_slices=0.5), TypeError, "num_slices"),
    "slices a flag": (lambda w: w.f(X, Y, 1.0, num_slices=True), TypeError, "num_slices"),
    "slices of nothing": (
        lambda w: synk.function([], (w.s.sum(), "sum"), name="g")(num_slices=2),
        ValueError,
        "num_slices",
    ),
    "slices of an average of integers": (lambda w: w.f(X, Y, 1.0, num_slices=2), ValueError, "num_slices"),
    "subset a number": (lambda w: w.f(X, Y, 1.0, output_subset=0), TypeError, "output_subset"),
    "subset too high": (lambda w: w.f(X, Y, 1.0, output_subset=[2]), IndexError, "output_subset"),
    "subset below 0": (lambda w: w.f(X, Y, 1.0, output_subset=[-1]), IndexError, "output_subset"),
    "subset of names": (lambda w: w.f(X, Y, 1.0, output_subset=["a"]), TypeError, "output_subset"),
}

#: Errors of the serial function.
AS_THEANO = {
    "nothing": (lambda w: w.f.as_theano(), TypeError, ""),
    # Updated variables are further inputs of the serial function.
    "too many": (
        lambda w: w.f.as_theano(X, Y, 1.0, X[0], Y, 2.0),
        TypeError,
        f"Too many parameter passed to {NAME} function",
    ),
    "another dtype": (lambda w: w.f.as_theano(X, Y + 0.5, 1.0), TypeError, ""),
    "no such name": (lambda w: w.f.as_theano(X, Y, v=1.0), TypeError, ""),
}

BUILD_INPUTS = {
    "nothing": (lambda w: w.f.build_inputs(), TypeError, "f"),
    "too many": (lambda w: w.f.build_inputs(X, Y, 1.0, 2.0), TypeError, ""),
    "no such name": (lambda w: w.f.build_inputs(X, Y, v=1.0), TypeError, "v"),
    "another dtype": (lambda w: w.f.build_inputs(X, Y + 0.5, 1.0), TypeError, "y"),
    "other dimensions": (lambda w: w.f.build_inputs(X[0], Y, 1.0), ValueError, "x"),
    "flags for others": (lambda w: w.f.build_inputs(X, Y, 1.0, minibatch=[True]), ValueError, "minibatch"),
    "minibatch a number": (lambda w: w.f.build_inputs(X, Y, 1.0, minibatch=1), TypeError, "minibatch"),
    "oversize": (lambda w: w.f.build_inputs(X, Y, 1.0, oversize=3), ValueError, "oversize"),
    "force": (lambda w: w.f.build_inputs(X, Y, 1.0, force_cast=1), TypeError, "force_cast"),
}

DATA = {
    "nothing": (lambda w: synk.data(), TypeError, "data"),
    "dtype alone": (lambda w: synk.data(dtype="float32"), TypeError, "data"),
    "ndim alone": (lambda w: synk.data(ndim=2), TypeError, "data"),
    "dtype nonsense": (lambda w: synk.data(dtype="real", ndim=1), TypeError, "dtype"),
    "dtype object": (lambda w: synk.data(dtype=object, ndim=1), TypeError, "dtype"),
    "dtype text": (lambda w: synk.data(dtype="U3", ndim=1), TypeError, "dtype"),
    "ndim a string": (lambda w: synk.data(dtype="f4", ndim="2"), TypeError, "ndim"),
    "ndim below 0": (lambda w: synk.data(dtype="f4", ndim=-1), ValueError, "ndim"),
    "ndim too high": (lambda w: synk.data(dtype="f4", ndim=99), ValueError, "ndim"),
    "shape a string": (lambda w: synk.data(dtype="f4", shape="23"), TypeError, "shape"),
    "shape a float": (lambda w: synk.data(dtype="f4", shape=2.5), TypeError, "shape"),
    "shape of floats": (lambda w: synk.data(dtype="f4", shape=(2.5,)), TypeError, "shape"),
    "shape below 0": (lambda w: synk.data(dtype="f4", shape=(2, -1)), ValueError, "shape"),
    "shape and ndim": (lambda w: synk.data(dtype="f4", ndim=2, shape=(2,)), ValueError, "shape"),
    "value and shape": (lambda w: synk.data(X, shape=(3, 2)), ValueError, ""),
    "value ragged": (lambda w: synk.data([[1], [1, 2]]), TypeError, "value"),
    "value text": (lambda w: synk.data(["a"]), TypeError, "value"),
    "value a variable": (lambda w: synk.data(T.dmatrix("x")), TypeError, "value"),
    "value an object": (lambda w: synk.data(object()), TypeError, "value"),
    "value of another dtype": (lambda w: synk.data(X, dtype="float32"), TypeError, "value"),
    "value of other dimensions": (lambda w: synk.data(X, ndim=1), ValueError, "ndim"),
    "value of another variable's": (lambda w: synk.data(X, w.y), ValueError, "value"),
    "var a string": (lambda w: synk.data(var="x"), TypeError, "var"),
    "var of another dtype": (lambda w: synk.data(var=w.x, dtype="f4"), ValueError, "dtype"),
    "var of nonsense": (lambda w: synk.data(var=w.x, dtype="real"), TypeError, "dtype"),
    "var of other dimensions": (lambda w: synk.data(var=w.x, ndim=1), ValueError, "ndim"),
    "var of no arrays": (lambda w: synk.data(var=w.generator), TypeError, "var"),
    "minibatch": (lambda w: synk.data(X, minibatch="yes"), TypeError, "minibatch"),
    "force_cast": (lambda w: synk.data(X, force_cast="no"), TypeError, "force_cast"),
    "oversize": (lambda w: synk.data(X, oversize=2.5), ValueError, "oversize"),
    "name": (lambda w: synk.data(X, name=3), TypeError, "name"),
}

MEMBERS = {
    "set_value dimensions": (lambda w: w.d.set_value(X[0]), ValueError, "x"),
    "set_value dtype": (lambda w: w.d.set_value(X * 1j), TypeError, "x"),
    "set_value text": (lambda w: w.d.set_value([["a"]], True), TypeError, "x"),
    "set_value None": (lambda w: w.d.set_value(None), TypeError, "x"),
    "set_value ragged": (lambda w: w.d.set_value([[1.0], [1.0, 2.0]]), TypeError, "x"),
    "set_value force": (lambda w: w.d.set_value(X, force_cast=2), TypeError, "force_cast"),
    "set_value too small": (lambda w: w.d.set_value(X, oversize=0.9), ValueError, "oversize"),
    "set_value too large": (lambda w: w.d.set_value(X, oversize=2.1), ValueError, "oversize"),
    "set_value not a number": (lambda w: w.d.set_value(X, oversize=np.nan), ValueError, "oversize"),
    "set_value a string": (lambda w: w.d.set_value(X, oversize="2"), TypeError, "oversize"),
    "set_value a flag": (lambda w: w.d.set_value(X, oversize=True), TypeError, "oversize"),
    "set_value no room": (lambda w: w.d.set_value(np.broadcast_to(1.0, (1 << 50, 1))), MemoryError, ""),
    "condition_data dimensions": (lambda w: w.d.condition_data(X[0]), ValueError, "x"),
    "condition_data dtype": (lambda w: w.d.condition_data(X * 1j), TypeError, "x"),
    "condition_data force": (lambda w: w.d.condition_data(X, "no"), TypeError, "force_cast"),
    "set_length string": (lambda w: w.d.set_length("3"), TypeError, "n"),
    "set_length float": (lambda w: w.d.set_length(3.0), TypeError, "n"),
    "set_length flag": (lambda w: w.d.set_length(True), TypeError, "n"),
    "set_length below 0": (lambda w: w.d.set_length(-1), ValueError, "n"),
    "set_length oversize": (lambda w: w.d.set_length(9, 3), ValueError, "oversize"),
    "set_length no room": (lambda w: w.d.set_length(1 << 50), MemoryError, ""),
    "set_length of a number": (lambda w: w.number.set_length(1), ValueError, ""),
    "set_shape string": (lambda w: w.d.set_shape("32"), TypeError, "shape"),
    "set_shape None": (lambda w: w.d.set_shape(None), TypeError, "shape"),
    "set_shape too few": (lambda w: w.d.set_shape((3,)), ValueError, "shape"),
    "set_shape a number": (lambda w: w.d.set_shape(3), ValueError, "shape"),
    "set_shape below 0": (lambda w: w.d.set_shape((3, -2)), ValueError, "shape"),
    "set_shape floats": (lambda w: w.d.set_shape((3.0, 2)), TypeError, "shape"),
    "minibatch": (lambda w: setattr(w.d, "minibatch", None), TypeError, "minibatch"),
    "index": (lambda w: w.d[3], IndexError, ""),
    "index of two": (lambda w: w.d[0, 2], IndexError, ""),
    "index to write": (lambda w: w.d.__setitem__(3, 0.0), IndexError, ""),
    "shape to write": (lambda w: w.d.__setitem__(0, [1.0, 2.0, 3.0]), ValueError, ""),
    "text to write": (lambda w: w.d.__setitem__(0, "a"), TypeError, "value"),
    "length of a number": (lambda w: len(w.number), TypeError, ""),
}


#: All of them, with the right arguments but for the variables.
COLLECTIVES = {
    "broadcast": synk.broadcast,
    "broadcast values": lambda v: synk.broadcast(v, [np.ones(2)] if isinstance(v, list) else np.ones(2)),
    "scatter": lambda v: synk.scatter(v, [np.ones(2)] if isinstance(v, list) else np.ones(2)),
    "gather": synk.gather,
    "all_gather": synk.all_gather,
    "reduce": synk.reduce,
    "all_reduce": synk.all_reduce,
    "reduce_scatter": synk.reduce_scatter,
    "set_value": lambda v: synk.set_value(1, v, [np.ones(2)] if isinstance(v, list) else np.ones(2)),
    "get_value": lambda v: synk.get_value(1, v),
    "get_lengths": synk.get_lengths,
    "get_shapes": synk.get_shapes,
}

#: Arguments that are not shared variables of the ranks.
NOT_VARIABLES = {
    "a string": (lambda w: "s", TypeError, "shared_vars"),
    "None": (lambda w: None, TypeError, "shared_vars"),
    "an array": (lambda w: np.ones(2), TypeError, "shared_vars"),
    "a dict": (lambda w: {w.s: 1}, TypeError, "shared_vars"),
    "an input": (lambda w: w.x, TypeError, "shared_vars"),
    "an expression": (lambda w: w.s + 1, TypeError, "shared_vars"),
    "a generator": (lambda w: w.generator, (TypeError, ValueError), "shared_vars"),
    "no function's": (lambda w: w.lonely, ValueError, "shared_vars"),
    "an empty list": (lambda w: [], ValueError, "shared_vars"),
    "a list of strings": (lambda w: ["s"], TypeError, "shared_vars"),
}

VALUES = {
    "text": (lambda w: w.s, lambda w: "ab", (TypeError, ValueError), "values"),
    "objects": (lambda w: w.s, lambda w: X[0].astype(object), TypeError, "values"),
    "None in a list": (lambda w: [w.s], lambda w: [None], TypeError, "values"),
    "another dtype": (lambda w: w.i, lambda w: np.ones(2), TypeError, "values"),
    "other dimensions": (lambda w: w.s, lambda w: X, TypeError, "values"),
    "Data of another dtype": (lambda w: w.i, lambda w: synk.data([1.0, 2.0]), TypeError, "values"),
    "Data of other dimensions": (lambda w: w.s, lambda w: w.d, TypeError, "values"),
    "one for two": (lambda w: [w.s, w.i], lambda w: [np.ones(2)], ValueError, "values"),
    "an array for two": (lambda w: (w.s, w.i), lambda w: np.ones((2, 2)), TypeError, "values"),
    "one right and one wrong": (lambda w: [w.s, w.i], lambda w: [np.ones(2), np.ones(2)], TypeError, "values"),
}

WITH_VALUES = {
    "broadcast": synk.broadcast,
    "scatter": synk.scatter,
    "set_value": lambda variables, values: synk.set_value(1, variables, values),
}

#: Wrong values of `batch` for three rows.
BATCHES = {
    "a string": ("2", TypeError, "batch"),
    "a float": (2.0, TypeError, "batch"),
    "too many": (4, IndexError, "batch"),
    "an index": ([3], IndexError, "batch"),
    "a mask": ([True, False], ValueError, "batch"),
    "a slice": (slice(1.5), TypeError, "batch"),
}

OPS = {
    "no such op": ("median", ValueError, "op"),
    "a function's op": ("mean", ValueError, "op"),
    "None": (None, TypeError, "op"),
    "a ufunc": (np.add, TypeError, "op"),
}

COLLECTIVE_ARGUMENTS = {
    "broadcast nccl": (lambda w: synk.broadcast(w.s, nccl=1), TypeError, "nccl"),
    "gather nccl": (lambda w: synk.gather(w.s, nccl=None), TypeError, "nccl"),
    "all_gather nccl": (lambda w: synk.all_gather(w.s, nccl="no"), TypeError, "nccl"),
    "reduce nccl": (lambda w: synk.reduce(w.s, nccl=0), TypeError, "nccl"),
    "all_reduce nccl": (lambda w: synk.all_reduce(w.s, nccl=0), TypeError, "nccl"),
    "reduce_scatter nccl": (lambda w: synk.reduce_scatter(w.s, nccl=0), TypeError, "nccl"),
    "reduce_scatter integers": (lambda w: synk.reduce_scatter(w.i), ValueError, "op"),
    "reduce in_place": (lambda w: synk.reduce(w.s, in_place=1), TypeError, "in_place"),
    "gather nd_up": (lambda w: synk.gather(w.s, nd_up=2), ValueError, "nd_up"),
    "gather nd_up below 0": (lambda w: synk.gather(w.s, nd_up=-1), ValueError, "nd_up"),
    "gather nd_up a flag": (lambda w: synk.gather(w.s, nd_up=True), TypeError, "nd_up"),
    "gather nd_up a string": (lambda w: synk.gather(w.s, nd_up="1"), TypeError, "nd_up"),
    "reduce integers": (lambda w: synk.reduce(w.i), ValueError, "op"),
    "reduce one of integers": (lambda w: synk.reduce([w.s, w.i], "avg"), ValueError, "op"),
    "all_reduce integers": (lambda w: synk.all_reduce(w.i), ValueError, "op"),
    "all_gather numbers": (lambda w: synk.all_gather(w.z), ValueError, "all_gather"),
    "scatter a number": (lambda w: synk.scatter(w.z, 3.0), ValueError, "shared_vars"),
    "get_lengths of a number": (lambda w: synk.get_lengths(w.z), ValueError, "shared_vars"),
    "get_lengths of one number": (lambda w: synk.get_lengths([w.s, w.z]), ValueError, "shared_vars"),
    "set_value rows of a number": (lambda w: synk.set_value(0, w.z, 3.0, batch=1), ValueError, "batch"),
    "twice": (lambda w: synk.all_reduce([w.s, w.s]), ValueError, "shared_vars"),
}

RANKS = {
    "too high": (2, IndexError, "rank"),
    "below 0": (-1, IndexError, "rank"),
    "a string": ("0", TypeError, "rank"),
    "a float": (1.0, TypeError, "rank"),
    "a flag": (True, TypeError, "rank"),
    "None": (None, TypeError, "rank"),
}


def list_cases(**tables):
    """Return the cases of several tables as parameters of a test."""
    return [
        pytest.param(*case, id=f"{name}-{title}".replace(" ", "_"))
        for name, table in tables.items()
        for title, case in table.items()
    ]


def check_refused(rank_objects, call, error, message):
    """Check that a call raises the error, of this very class, and leaves the objects unchanged."""
    expected = error if isinstance(error, tuple) else (error,)
    with raises(expected, message) as caught:
        call(rank_objects)
    assert type(caught.value) in expected, "a subclass says less than its base"
    rank_objects.check()


# NumPy 1.23 only warns where NumPy 2 raises.
pytestmark = pytest.mark.filterwarnings("ignore:Creating an ndarray from ragged", "ignore:elementwise comparison")


@pytest.mark.parametrize(
    ("call", "error", "message"),
    list_cases(
        fork=FORK,
        running=WHILE_RUNNING,
        function=FUNCTION,
        call=CALL,
        as_theano=AS_THEANO,
        build_inputs=BUILD_INPUTS,
        data=DATA,
        Data=MEMBERS,
        collective=COLLECTIVE_ARGUMENTS,
    ),
)
def test_wrong_argument_is_named_and_changes_nothing(rank_objects, call, error, message):
    check_refused(rank_objects, call, error, message)


@pytest.mark.parametrize("value", [2**64, 10**400, -(2**63) - 1, True, 1j, "1", np.ones(1)])
def test_check_number_refuses_other_values(value):
    with pytest.raises(TypeError, match="^rate: expected a number, got "):
        check_number(value, "rate")
    assert check_number(2**63, "rate") == 2.0**63 and check_number(np.float32(0.5), "rate") == 0.5


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize(("variable", "error", "message"), list_cases(of=NOT_VARIABLES))
def test_collectives_refuse_variables_unknown_to_the_ranks(rank_objects, collective, variable, error, message):
    check_refused(rank_objects, lambda w: COLLECTIVES[collective](variable(w)), error, message)


@pytest.mark.parametrize("collective", WITH_VALUES)
@pytest.mark.parametrize(("variables", "values", "error", "message"), list_cases(of=VALUES))
def test_collectives_refuse_wrong_values(rank_objects, collective, variables, values, error, message):
    check_refused(rank_objects, lambda w: WITH_VALUES[collective](variables(w), values(w)), error, message)


@pytest.mark.parametrize("collective", [synk.scatter, lambda *args, **kwargs: synk.set_value(1, *args, **kwargs)])
@pytest.mark.parametrize(("batch", "error", "message"), list_cases(of=BATCHES))
def test_batch_refuses_wrong_rows(rank_objects, collective, batch, error, message):
    check_refused(rank_objects, lambda w: collective(w.s, np.arange(3.0), batch=batch), error, message)


@pytest.mark.parametrize("collective", [synk.reduce, synk.all_reduce])
@pytest.mark.parametrize(("op", "error", "message"), list_cases(of=OPS))
def test_op_refuses_wrong_names(rank_objects, collective, op, error, message):
    check_refused(rank_objects, lambda w: collective(w.s, op), error, message)


@pytest.mark.parametrize("collective", [synk.get_value, lambda rank, s: synk.set_value(rank, s, np.ones(2))])
@pytest.mark.parametrize(("rank", "error", "message"), list_cases(of=RANKS))
def test_rank_refuses_wrong_numbers(rank_objects, collective, rank, error, message):
    check_refused(rank_objects, lambda w: collective(rank, w.s), error, message)


# -- unusual arguments that are valid ------------------------------------------------------------------------


def test_updates_and_givens_may_be_values(rank_objects):
    # As the plain libraries take them.
    f = synk.function(
        [],
        (rank_objects.w * 2, "sum"),
        updates=[(rank_objects.s, [7.0, 8.0]), (rank_objects.z, np.array(9.0))],
        givens={rank_objects.w: 3.0},
    )
    assert f() == 12.0
    assert synk.gather([rank_objects.s, rank_objects.z])[0].tolist() == [[7.0, 8.0], [7.0, 8.0]]
    assert synk.gather(rank_objects.z).tolist() == [9.0, 9.0]
    synk.set_value(0, [rank_objects.s, rank_objects.z], [[1.0, 2.0], np.array(0.0)])
    synk.set_value(1, [rank_objects.s, rank_objects.z], [[2.0, 2.0], np.array(1.0)])
    rank_objects.check()


def test_givens_may_replace_unset_inputs(rank_objects):
    middle = rank_objects.x.sum()
    f = synk.function([rank_objects.y], (middle * rank_objects.y, "gather"), givens=[(middle, rank_objects.z + 2)])
    assert f(np.arange(3)).tolist() == [0.0, 2.0, 6.0]
    rank_objects.check()


# -- before fork and after close -----------------------------------------------------------------------------

#: Each needs ranks, and gets right arguments.
NEED_RANKS = {
    "function": lambda w: synk.function([w.x], (w.x, "gather")),
    "distribute": lambda w: synk.distribute(),
    "call": lambda w: w.f(X, Y, 1.0),
    "build_inputs": lambda w: w.f.build_inputs(X, Y, 1.0),
    "data": lambda w: synk.data(X),
    "Data": lambda w: synk.Data("float32", 2),
    **{name: lambda w, collective=collective: collective(w.s) for name, collective in COLLECTIVES.items()},
}


def test_closed_ranks_can_only_be_forked_again(rank_objects):
    synk.close()
    assert synk.close() is None
    for call in NEED_RANKS.values():
        with raises(RuntimeError):
            call(rank_objects)
    for call, error, message in FORK.values():
        with raises(error, message):
            call(rank_objects)
        with raises(RuntimeError):
            synk.distribute()
    fork_ranks(2)
    rank_objects.__init__()


def test_call_before_fork_names_fork():
    out = run_code(
        """
        import numpy as np
        import synkhronos as synk
        from library import shared, tensor as T

        x, s = T.dmatrix("x"), shared(np.zeros(2), "s")
        for call in (lambda: synk.function([x], x.sum()), lambda: synk.data(np.ones(2)), lambda: synk.all_reduce(s)):
            try:
                call()
            except RuntimeError as error:
                print(error)
        assert synk.close() is None
        assert synk.get_n_gpu() >= 0
        """
    )
    assert out == 3 * "no ranks are running: call synkhronos.fork() first\n"
