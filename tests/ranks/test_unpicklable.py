"""Objects that cannot be sent to the ranks unchanged are refused with advice."""

import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import scipy.sparse
from library import DEVICE, INTERPRETED, NAME, shared
from library import tensor as T
from messages import raises

import synkhronos as synk

if NAME == "pytensor":
    from pytensor import sparse
    from pytensor.compile.debug.monitormode import MonitorMode
    from pytensor.compile.debug.nanguardmode import NanGuardMode
else:
    from theano import sparse
    from theano.compile.monitormode import MonitorMode
    from theano.compile.nanguardmode import NanGuardMode

MASKED = np.ma.masked_array(np.arange(6.0).reshape(3, 2), [[0, 0], [0, 1], [0, 0]])
#: On the host only: XLA has neither sparse matrices nor modes that check each node.
on_host = pytest.mark.skipif(DEVICE != "host", reason="on the host")


# -- masked arrays ----------------------------------------------------------------------------------------------


def make_masked_calls():
    x, w, s = T.dmatrix("x"), T.dmatrix("w"), shared(np.zeros((3, 2)), "s")
    f = synk.function([x], (x.sum() + w.sum() + s.sum(), "sum"), bcast_inputs=[w], name="f", sliceable_shareds=[s])
    d = synk.data(np.zeros((3, 2)))
    plain = np.zeros((3, 2))
    mask = np.ma.masked_array([True, False, True], [False, True, False])
    return {
        "input": (lambda: f(MASKED, plain), r"input 0 \(x\) of f"),
        "rows": (lambda: f(list(MASKED), plain), r"input 0 \(x\) of f"),
        "bcast_input": (lambda: f(plain, MASKED), r"input 1 \(w\) of f"),
        "named": (lambda: f(plain, w=MASKED), r"input 1 \(w\) of f"),
        "batch": (lambda: f(plain, plain, batch=mask), "batch"),
        "batch_s": (lambda: f(plain, plain, batch_s=np.ma.masked_array([0, 1], [True, False])), "batch_s"),
        "data": (lambda: synk.data(MASKED), "value"),
        "data for a variable": (lambda: synk.data(MASKED, var=x), "value"),
        "build_inputs": (lambda: f.build_inputs(MASKED, plain), "value"),
        "set_value": (lambda: d.set_value(MASKED), "x"),
        "condition_data": (lambda: d.condition_data(MASKED), "x"),
        "Data's rows": (lambda: d.__setitem__(0, MASKED[1]), "value"),
        "broadcast": (lambda: synk.broadcast(s, MASKED), "values: 's'"),
        "scatter": (lambda: synk.scatter(s, MASKED), "values: 's'"),
        "set_value of a rank": (lambda: synk.set_value(1, s, MASKED), "values: 's'"),
    }


def test_masked_arrays_are_refused(two_ranks_per_test):
    for name, (provoke, argument) in make_masked_calls().items():
        words = rf"^{argument}: expected an array, got a masked one, whose mask would be lost: pass .filled\(value\)"
        with pytest.raises(TypeError, match=words):
            pytest.fail(f"{name}: nothing was raised, but {provoke()} returned")
    # A masked array without masked elements is accepted: readers of many file formats return such arrays.
    d = synk.data(np.ma.masked_array(np.ones((3, 2))))
    d[0] = np.ma.masked_array([2.0, 3.0], False)
    np.testing.assert_array_equal(d, [[2, 3], [1, 1], [1, 1]])


# -- sparse ones ------------------------------------------------------------------------------------------------


@on_host
def test_function_refuses_sparse_inputs(two_ranks_per_test):
    x, y = sparse.csr_matrix("x", dtype="float64"), T.dmatrix("y")
    words = "inputs: 'x' is sparse, and inputs have to be dense arrays: pass its data, indices, indptr and shape"
    with pytest.raises(TypeError, match=f"^{words}"):
        synk.function([x], (sparse.sp_sum(x), "sum"))
    with pytest.raises(TypeError, match=f"^bcast_{words}"):
        synk.function([y], (sparse.dot(x, y).sum(), "sum"), bcast_inputs=[x])
    with raises(TypeError, "var"):
        synk.data(var=x)
    with raises(TypeError, "value"):
        synk.data(scipy.sparse.csr_matrix(np.eye(3)))


@on_host
def test_sparse_shared_variables_only_in_functions(two_ranks_per_test):
    s = shared(scipy.sparse.csr_matrix(np.diag([1.0, 2.0, 3.0])), "s")
    y = T.dmatrix("y")
    f = synk.function([y], (sparse.dot(y, s), "gather"), updates=[(s, s + s)], mode=INTERPRETED, name="f")
    value = np.arange(6.0).reshape(2, 3)
    np.testing.assert_array_equal(f(value), value * [1, 2, 3])
    np.testing.assert_array_equal(f(value), value * [2, 4, 6])
    for act in (
        lambda: synk.broadcast(s),
        lambda: synk.gather(s),
        lambda: synk.all_reduce(s),
        lambda: synk.get_value(1, s),
        lambda: synk.set_value(1, s, np.eye(3)),
        lambda: synk.scatter(s, np.eye(3)),
        lambda: synk.get_shapes(s),
    ):
        with pytest.raises(
            TypeError, match="^shared_vars: expected variables whose values are arrays, got .*[Ss]parse"
        ):
            act()
    with raises(TypeError, "num_slices"):
        f(value, num_slices=2)
    with raises(ValueError, "sliceable_shareds"):
        synk.function([], (sparse.sp_sum(s), "sum"), sliceable_shareds=[s])
    with raises(TypeError, "outputs"):
        synk.function([], s)
    g = synk.function([], (s, None), mode=INTERPRETED)
    np.testing.assert_array_equal(g().toarray(), np.diag([4, 8, 12]))


@on_host
def test_sparse_inputs_can_be_built_from_parts(two_ranks_per_test):
    y, parts = T.dmatrix("y"), [T.dvector("data"), T.ivector("indices"), T.ivector("indptr"), T.ivector("shape")]
    f = synk.function([y], (sparse.dot(y, sparse.CSR(*parts)), "gather"), bcast_inputs=parts, mode=INTERPRETED)
    matrix = scipy.sparse.csr_matrix(np.diag([1.0, 0.0, 3.0]))
    value = np.arange(12.0).reshape(4, 3)
    result = f(value, matrix.data, matrix.indices, matrix.indptr, np.array(matrix.shape, "int32"))
    np.testing.assert_array_equal(result, value * [1, 0, 3])


# -- modes ------------------------------------------------------------------------------------------------------


def test_function_refuses_unknown_modes(two_ranks_per_test):
    x = T.dvector("x")
    with pytest.raises(ValueError, match=f"^mode: {NAME} has no mode 'NOPE'"):
        synk.function([x], x.sum(), mode="NOPE")
    with pytest.raises(TypeError, match=f"^mode: expected a mode of {NAME}, or the name of one, got 3"):
        synk.function([x], x.sum(), mode=3)


@on_host
@pytest.mark.parametrize("mode", ["NanGuardMode", NanGuardMode(True, True, True)], ids=["by name", "made"])
def test_nan_guard_mode_checks_every_rank(mode, two_ranks_per_test):
    x = T.dvector("x")
    f = synk.function([x], (T.log(x).sum(), "sum"), mode=mode)
    assert f(np.ones(4)) == 0
    with pytest.raises(synk.WorkerError, match="rank 1 raised AssertionError: (?s:.*)NaN"):
        f(np.array([1.0, 1.0, -1.0, 1.0]))


@on_host
def test_mode_with_user_functions_calls_the_masters(two_ranks_per_test):
    calls = []
    x = T.dvector("x")
    f = synk.function([x], (x.sum(), "sum"), mode=MonitorMode(post_func=lambda *arguments: calls.append(1)))
    assert f(np.ones(3)) == 3
    # Each worker has a copy of the mode; the master's is the user's object.
    assert calls


# -- classes defined after the fork -----------------------------------------------------------------------------

OP = f"""
    import numpy as np
    import {NAME} as library, {NAME}.tensor as T
    from {"pytensor.graph.basic import Apply" if NAME == "pytensor" else "theano.gof import Apply"}
    from {"pytensor.graph.op import Op" if NAME == "pytensor" else "theano.gof import Op"}

    class Twice(Op):
        __props__ = ()

        def make_node(self, x):
            return Apply(self, [x], [x.type()])

        def perform(self, node, inputs, outputs, *_):
            outputs[0][0] = 2 * inputs[0]
"""


def run_program(program, *arguments, **kwargs):
    """Run a program in a new process; return the completed process."""
    flags = {"PYTENSOR_FLAGS": "mode=FAST_COMPILE", "THEANO_FLAGS": "mode=FAST_COMPILE,blas.ldflags="}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), *arguments],
        env={**os.environ, **flags, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        capture_output=True,
        text=True,
        timeout=120,
        **kwargs,
    )


@on_host
def test_workers_find_modules_on_later_paths(tmp_path):
    (tmp_path / "users_op.py").write_text(textwrap.dedent(OP))
    done = run_program(
        f"""
        import sys
        import numpy as np
        import {NAME}.tensor as T
        import synkhronos as synk

        synk.fork(2, use_gpu=False)
        sys.path.insert(0, sys.argv[1])
        import users_op
        x = T.dvector("x")
        print(synk.function([x], (users_op.Twice()(x), "gather"))(np.arange(4.0)))
        """,
        str(tmp_path),
    )
    assert done.stdout == "[0. 2. 4. 6.]\n", done.stderr


@on_host
def test_class_of_a_handmade_module_is_sent(tmp_path):
    done = run_program(
        f"""
        import sys, types
        import numpy as np
        import {NAME}.tensor as T
        import synkhronos as synk

        synk.fork(2, use_gpu=False)
        made = types.ModuleType("made_by_hand")  # of no file
        sys.modules["made_by_hand"] = made
        exec(sys.argv[1], made.__dict__)
        x = T.dvector("x")
        print(synk.function([x], (made.Twice()(x), "gather"))(np.arange(4.0)))
        """,
        textwrap.dedent(OP),
    )
    assert done.stdout == "[0. 2. 4. 6.]\n", done.stdout + done.stderr


# -- limits -----------------------------------------------------------------------------------------------------


@on_host
def test_limit_of_file_sizes_is_named():
    done = run_program(
        """
        import resource
        import synkhronos as synk

        synk.fork(2, use_gpu=False)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
        try:
            synk.data(shape=1 << 20, dtype="float64")
        except MemoryError as error:
            print(error)
        print(synk.data(shape=10, dtype="float64").shape)
        """
    )
    error, shape = done.stdout.splitlines()
    assert error == (
        "can't create 8,388,608 bytes of shared memory: this process may not create files of more than 1,048,576 bytes, "
        "see `ulimit -f`"
    ), done.stderr
    assert shape == "(10,)"
