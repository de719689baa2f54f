"""The module that ``import theano`` finds: on PyTensor, beside Theano, and by ``python -m synkhronos``."""

import importlib
import importlib.util
import json
import os
import pickle
import re
import subprocess
import sys

import pytest

pytest.importorskip("pytensor")

import numpy as np
import pytensor
import pytensor.tensor as pt
import theano
import theano.tensor as T
from system import run_code

import synkhronos as synk
import synkhronos.compat
from synkhronos.compat import theano_import
from synkhronos.compat.flags import Config, to_pytensor_flags
from synkhronos.compat.import_hooks import find_theano
from synkhronos.graph_libraries import get_library, list_loaded_libraries

NEEDS_JAX = pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="needs JAX")


def run(code, *arguments, **environment):
    """Run code in a new process, without Theano's flags unless they are given; return its output."""
    return run_code(code, *arguments, **{"THEANO_FLAGS": "", **environment}).strip()


# -- the hook --------------------------------------------------------------------------------------------------------


def test_import_theano_finds_a_module_on_pytensor():
    assert synkhronos.compat.library == "pytensor"
    assert theano.__version__ == "1.0.5"
    x = T.matrix("x", "float32")
    assert isinstance(x, pytensor.graph.basic.Variable) and x.dtype == "float32"
    assert theano.function([x], T.sqr(x).sum(), mode="FAST_COMPILE")([[1, 2]]) == 5


def test_filled_arrays_have_static_lengths():
    n, x, row = T.iscalar("n"), T.matrix("x"), T.row("row")
    assert T.zeros((2, n), "int8").type == pt.TensorType("int8", (2, None))
    assert T.ones(3).type.shape == (3,)
    assert T.alloc(1.5, x.shape[0], row.shape[0], 1).type.shape == (None, 1, 1)
    assert T.zeros(x.shape).type.shape == (None, None)
    value = T.alloc(T.vector("v"), n, 2)
    np.testing.assert_array_equal(value.eval({"n": 3, "v": [1, 2]}), [[1, 2]] * 3)
    with pytest.raises(TypeError, match="integer"):
        T.zeros((T.dscalar(), 2))


def test_alloc_traverses_no_graph_of_its_lengths(monkeypatch):
    """Or deep networks whose layers pad take a time that grows with the square of their depth."""
    sizes, make = [], pytensor.tensor.basic.FunctionGraph

    def watched(*args, **kwargs):
        graph = make(*args, **kwargs)
        sizes.append(len(graph.apply_nodes))
        return graph

    monkeypatch.setattr(pytensor.tensor.basic, "FunctionGraph", watched)
    x = T.matrix("x")
    for _ in range(10):
        x = T.set_subtensor(T.zeros((x.shape[0] + 2, x.shape[1]))[1:-1], x)
    assert sizes and max(sizes) <= 1


def test_functions_are_not_hidden_by_modules_of_their_name():
    import theano.tensor.sort  # noqa: F401 - after it the name is the function's still
    from theano.tensor.basic import as_tensor_variable, largest
    from theano.tensor.var import TensorVariable

    x = as_tensor_variable([3.0, 1.0])
    assert isinstance(largest(x, 2.0) + T.dvector(), TensorVariable)
    assert T.var(x).eval(mode="FAST_COMPILE") == 1 and T.sort(x).eval(mode="FAST_COMPILE").tolist() == [1, 3]


def test_folder_named_theano_is_not_imported(tmp_path):
    (tmp_path / "theano").mkdir()
    code = "import sys; sys.path.insert(0, sys.argv[1]); import synkhronos.compat as c; print(c.library)"
    assert run(code, str(tmp_path)) == "pytensor"


def test_fast_run_works_with_every_linker():
    code = "import theano; x = theano.tensor.vector('x'); print(theano.function([x], x.sum(), mode=theano.compile.FAST_RUN)([1, 2]))"
    for flags in ("linker=py", "mode=Mode,linker=py,optimizer=None", ""):
        assert run("import synkhronos.compat; " + code, PYTENSOR_FLAGS=flags) == "3.0"


def test_second_install_adds_no_finder():
    assert synkhronos.compat.install() == "pytensor"
    assert sum(getattr(finder, "hook", None) is find_theano for finder in sys.meta_path) == 1


def test_import_hook_imports_no_library():
    code = """
    import sys, synkhronos.compat
    print([name for name in ("pytensor", "theano", "jax", "numba") if name in sys.modules])
    import theano.tensor.nnet, theano.sandbox.rng_mrg
    print("jax" in sys.modules)  # it does not survive a fork
    """
    assert run(code).splitlines() == ["[]", "False"]


@pytest.mark.parametrize(
    "line",
    [
        "import theano.d3viz",
        "from theano import d3viz",
        "from theano.gpuarray import GpuArrayType",
        "from theano.gpuarray.dnn import GpuDnnConv",
        "import theano.gpuarray.fft",
        "from theano.tensor import nothing",
        "from theano.tensor.nnet.bn import nothing",
        "from theano.sandbox.cuda.dnn import GpuDnnConv",
    ],
)
def test_missing_module_is_named(line):
    with pytest.raises(ImportError, match=r"^theano\..* is not provided by synkhronos.compat.*From Theano"):
        exec(line, {})


@pytest.mark.parametrize("name", ["theano.nothing", "theano.tensor.nothing", "theanompi.models"])
def test_find_spec_of_a_missing_module_is_none(name):
    assert importlib.util.find_spec(name) is None
    with pytest.raises(ModuleNotFoundError, match=f"^{name}"):
        importlib.import_module(name)


def test_finder_that_a_script_calls_raises_the_error_of_its_hook():
    code = """if True:
        import sys, synkhronos.compat
        for finder in sys.meta_path:
            try:
                finder.find_spec("theano.nothing", None)
            except ModuleNotFoundError as error:
                print(error)
    """
    assert run(code).startswith("theano.nothing is not provided")


def test_missing_name_is_named():
    for module in (theano, T, T.nnet, theano.gradient):
        assert not hasattr(module, "nothing")
        with pytest.raises(AttributeError, match=rf"^{module.__name__}.nothing is not provided by synkhronos.compat"):
            module.nothing  # noqa: B018
    with pytest.raises(AttributeError, match="theano.config.nothing is not provided"):
        theano.config.nothing  # noqa: B018


def test_every_theano_module_can_be_imported_alone():
    """In any order: each in turn, in a process that has imported no other."""
    code = """
    import importlib, json, sys
    import synkhronos.compat, pytensor
    failed = {}
    for name in json.loads(sys.argv[1]):
        for loaded in [m for m in sys.modules if m.split(".")[0] == "theano"]:
            del sys.modules[loaded]
        try:
            module = importlib.import_module(name)
            missing = [n for n in getattr(module, "__all__", []) if not hasattr(module, n)]
            if missing or not module.__doc__:
                failed[name] = missing
        except Exception as error:
            failed[name] = repr(error)
    print(json.dumps(failed))
    """
    assert json.loads(run(code, json.dumps(list_theano_modules()))) == {}


def list_theano_modules():
    from synkhronos.compat.import_hooks import _THEANO_FOLDER
    from synkhronos.compat.re_exports import RE_EXPORTS

    files = sorted(_THEANO_FOLDER.rglob("*.py"))
    names = [".".join(["theano", *file.relative_to(_THEANO_FOLDER).with_suffix("").parts]) for file in files]
    return [*(name.removesuffix(".__init__") for name in names), *RE_EXPORTS]


def test_graphs_of_theano_names_are_pytensors():
    x = T.nnet.softmax(T.nnet.conv2d(T.tensor4(), T.tensor4(), border_mode="half").flatten(2))
    assert [library.name for library in list_loaded_libraries()] == ["pytensor"]
    assert get_library(x).name == "pytensor"


def test_crossentropy_softmax_argmax_equals_theano():
    x, b, y = T.dmatrix("x"), T.dvector("b"), T.ivector("y")
    with_argmax = T.nnet.crossentropy_softmax_argmax_1hot_with_bias(x, b, y)
    f = theano.function([x, b, y], with_argmax, mode="FAST_COMPILE")
    # As Theano 1.0.5 computed them.
    p = [[0.1, 0.9], [0.5, 0.5]]
    expected = [[np.log(10), np.log(2)], p, [1, 0]]
    for result, value in zip(f([[0, 0], [np.log(9), 0]], [0, np.log(9)], [0, 1]), expected, strict=True):
        np.testing.assert_allclose(result, value)
    assert with_argmax[2].dtype == "int32"


def test_graphs_can_be_pickled():
    x = T.dmatrix("x")
    loss = T.nnet.categorical_crossentropy(T.nnet.softmax(x), np.array([1])).sum()
    copy_x, copy_loss = pickle.loads(pickle.dumps((x, loss)))
    value = np.array([[0.0, 3.0]])
    assert copy_loss.eval({copy_x: value}, mode="FAST_COMPILE") == loss.eval({x: value}, mode="FAST_COMPILE")


def test_functions_run_on_all_ranks(fork):
    from theano.tensor.signal import downsample

    fork(2)
    x, w = T.dtensor4("x"), theano.shared(np.ones((2, 1, 3, 3)), "w", borrow=True)
    y = downsample.max_pool_2d(T.nnet.conv2d(x, w), (2, 2)).sum(axis=(1, 2, 3))
    f = synk.function([x], (y, "gather"), updates=[(w, w + 1)])
    value = np.random.default_rng(0).normal(size=(5, 1, 6, 6))
    expected = y.eval({x: value}, mode="FAST_COMPILE")
    np.testing.assert_allclose(f(value), expected)
    np.testing.assert_array_equal(synk.get_value(1, w), 2 * np.ones((2, 1, 3, 3)))


# -- arguments as Theano had them ------------------------------------------------------------------------------------


def test_variable_constructors_take_theanos_arguments():
    assert T.tensor("float32", (False, True), "x").broadcastable == (False, True)
    assert T.TensorType("int64", (True, False))("x").type.shape == (1, None)
    assert T.scalar("a", "int32").dtype == "int32" and T.tensor4().dtype == theano.config.floatX
    assert [v.name for v in T.matrices("a", "b")] == ["a", "b"]
    assert theano.shared(np.zeros((1, 3)), "b", broadcastable=(True, False)).broadcastable == (True, False)
    assert isinstance(theano.shared(1.0), theano.compile.SharedVariable)
    assert isinstance(T.matrix() + 1, T.TensorVariable) and isinstance(T.constant(1), theano.gof.Constant)


@pytest.mark.filterwarnings("ignore:Setting default_update is deprecated")
def test_functions_take_theanos_arguments():
    x, y = T.fvector("x"), T.fvector("y")
    w = theano.shared(np.float32(2), "w")
    w.default_update = w + 1
    f = theano.function(
        [x, theano.In(y, name="z", borrow=True)],
        w * x.sum(),
        givens={w: w + 1},
        no_default_updates=True,
        allow_input_downcast=True,
        on_unused_input="ignore",
        mode="FAST_COMPILE",
        name="f",
    )
    assert f(np.ones(2), z=[1.0]) == 6 and w.get_value() == 2
    assert theano.function([], w, mode="FAST_RUN")() == 2 and w.get_value() == 3


@pytest.mark.parametrize("mode", ["FAST_COMPILE", pytest.param("JAX", marks=NEEDS_JAX)])
@pytest.mark.parametrize("describe_input", [theano.In, theano.Param])  # Param is older
def test_inputs_have_default_values(mode, describe_input):
    x, rate = T.dscalars("x", "rate")
    value = {"value" if describe_input is theano.In else "default": 0.5}
    f = theano.function([x, describe_input(rate, **value)], x * rate, mode=mode)
    for g in (f, f.copy(), pickle.loads(pickle.dumps(f)) if mode != "JAX" else f):
        assert [g(4), g(4, 2), g(4, rate=3), g(x=4), g(rate=1, x=4), g(4)] == [2, 8, 12, 2, 4, 2]
        with pytest.raises(TypeError, match="Missing input"):
            g()
        with pytest.raises(ValueError, match="a half"):
            g(4, "a half")
        assert g(4) == 2
    with pytest.raises(TypeError):
        theano.In(T.iscalar(), value=0.5)


def test_mutable_default_value_is_kept():
    x = T.dvector("x")
    f = theano.function([theano.In(x, value=np.zeros(2), mutable=True)], x + 1, mode="FAST_RUN")
    assert f().tolist() == f().tolist() == [1, 1]


def test_functions_return_a_dict_of_outputs():
    x = T.dvector("x")
    f = theano.function([x], {"sum": x.sum(), "largest": x.max()}, mode="FAST_COMPILE")
    for g in (f, f.copy(), pickle.loads(pickle.dumps(f))):
        assert g([1, 3]) == {"largest": 3, "sum": 4}
    assert theano.function([x], {"sum": x.sum()}, mode="FAST_COMPILE")([1, 3]) == {"sum": 4}


@pytest.mark.parametrize("mode", ["FAST_COMPILE", pytest.param("JAX", marks=NEEDS_JAX)])
def test_inputs_with_updates_keep_their_values(mode):
    inc, state = T.iscalars("inc", "state")
    f = theano.function([theano.In(inc, value=1), theano.In(state, value=0, update=state + inc)], state, mode=mode)
    assert [f(), f(), f(10), f()] == [0, 1, 2, 12]


def test_synk_functions_have_default_values(two_ranks_per_test):
    x, rate = T.dmatrix("x"), T.dscalar("rate")
    f = synk.function([x], (x.sum() * rate, "sum"), [theano.In(rate, value=2.0)])
    rows = np.ones((4, 2))
    assert [f(rows), f(rows, 3.0), f(rows, rate=5.0), f(rows), f.as_theano(rows)] == [16, 24, 40, 16, 16]


@NEEDS_JAX
def test_functions_return_numpy_arrays_in_jax_mode():
    x, w = T.dvector("x"), theano.shared(np.ones(3), "w")
    outputs = [T.argsort(x), T.argmax(x), x.shape[0], T.cast(x, "int8"), x > 1, x * w]
    f = theano.function([x], outputs, updates=[(w, w + 1)], mode="JAX")
    serial = theano.function([x], outputs, mode="FAST_COMPILE")([3.0, 1, 2])
    results = f([3.0, 1, 2])
    for result, expected in zip(results, serial, strict=True):
        assert type(result) is np.ndarray and result.dtype == expected.dtype
        np.testing.assert_array_equal(result, expected)
    assert dict.fromkeys(results[0], "seen") == {0: "seen", 1: "seen", 2: "seen"}
    assert theano.function([], [], updates=[], mode="JAX")() == []
    results[-1][0] = 7  # nobody else's
    for borrow in (False, True):
        value = w.get_value(borrow=borrow)
        assert type(value) is np.ndarray and value.tolist() == [2, 2, 2]
        value[0] = 7
    assert w.get_value().tolist() == [2, 2, 2]
    assert type(x.sum().eval({x: [1.0, 2]}, mode="JAX")) is np.ndarray


@NEEDS_JAX
def test_integers_keep_dtype_with_floatx_float32():
    code = """
    import synkhronos.compat, numpy as np, theano, theano.tensor as T
    x = T.vector("x")
    f = theano.function([x], [T.argmax(x), T.mean(x), x.shape[0]])
    print([r.dtype.name for r in f(np.ones(3, "float32"))])
    """
    assert run(code, THEANO_FLAGS="floatX=float32,device=cuda", PYTENSOR_FLAGS="") == "['int64', 'float32', 'int64']"


def test_programs_that_import_theanos_gpu_code_run():
    code = """
    import synkhronos.compat
    import theano, theano.gpuarray, theano.sandbox.cuda
    from theano.gpuarray import dnn
    from theano.sandbox.cuda.basic_ops import gpu_contiguous
    import theano.tensor as T
    assert not theano.gpuarray.pygpu_activated and not theano.sandbox.cuda.cuda_enabled
    assert not dnn.dnn_available() and not theano.sandbox.cuda.dnn.dnn_available() and dnn.dnn_available.msg
    x = T.vector()
    assert theano.function([x], gpu_contiguous(x) + 1)([1]) == 2
    try:
        theano.gpuarray.GpuArrayType
    except AttributeError as error:
        print(error)
    theano.gpuarray.use("cpu")
    print(theano.config.mode == "JAX")
    theano.gpuarray.use("cuda0", preallocate=0.5)
    print(theano.config.mode)
    """
    warning, *modes = run(code).splitlines()
    assert warning.startswith("theano.gpuarray.GpuArrayType is not provided by synkhronos.compat")
    assert modes == ["False", "JAX"]


def test_variables_are_true_except_comparisons():
    x, y = T.dmatrix("x"), T.dvector("y")
    for variable in (x, x + y, T.eq(x, y), x.sum(), T.constant(0), theano.shared(0.0), T.iscalar()):
        assert variable and not (not variable)
    input = None
    assert (x if not input else input) is x and (input or y) is y and any([x, y])
    for comparison in (x < y, x <= y, x > 0, 0 >= y):
        with pytest.raises(TypeError, match="has no truth value"):
            bool(comparison)
    with pytest.raises(TypeError, match="a < b < c"):
        0 < x < 1  # noqa: B015
    assert bool(theano.ifelse.ifelse(T.gt(x.sum(), 0), x, -x))


@pytest.mark.parametrize("mode", ["FAST_COMPILE", pytest.param("JAX", marks=NEEDS_JAX)])
def test_abstract_convolution_ops_equal_the_functions(mode):
    from theano.tensor.nnet import abstract_conv

    settings = {"border_mode": (1, 0), "subsample": (2, 1), "filter_flip": False}
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(2, 3, 6, 5)), rng.normal(size=(4, 3, 3, 2))
    y = T.nnet.conv2d(x, w, **settings).eval(mode="FAST_COMPILE")
    rows = T.iscalar("rows")
    layers = [
        abstract_conv.AbstractConv2d((2, 3, 6, 5), (4, 3, 3, 2), **settings)(x, w),
        abstract_conv.AbstractConv2d_gradInputs(imshp=(2, 3, 6, 5), kshp=None, **settings)(w, y, (rows, 5)),
        abstract_conv.AbstractConv2d_gradInputs(**settings)(w, y, T.stack([rows, 5])),
        abstract_conv.AbstractConv_gradInputs(2, **settings)(w, y, [6, 5], add_assert_shape=False),
        abstract_conv.AbstractConv2d_gradWeights(**settings)(x, y, (3, 2)),
        abstract_conv.AbstractConv3d()(x[:, :, None], w[:, :, None]),
        abstract_conv.AbstractConv3d_gradWeights()(x[:, :, None], x[:, :, None], (1, 1, 1)),
    ]
    input_gradient = abstract_conv.conv2d_grad_wrt_inputs(y, w, (2, 3, 6, 5), **settings)
    weight_gradient = abstract_conv.conv2d_grad_wrt_weights(x, y, (4, 3, 3, 2), **settings)
    expected = [
        y,
        input_gradient,
        input_gradient,
        input_gradient,
        weight_gradient,
        T.nnet.conv3d(x[:, :, None], w[:, :, None]),
        np.einsum("bihw,bohw->oi", x, x)[:, :, None, None, None],
    ]
    results = theano.function([rows], layers, mode=mode)(6)
    for result, variable in zip(results, expected, strict=True):
        value = variable if isinstance(variable, np.ndarray) else variable.eval(mode="FAST_COMPILE")
        np.testing.assert_allclose(result, value)


def test_conv3d2d_equals_its_definition():
    import theano.tensor as T
    from theano.tensor.nnet import conv3d2d

    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(2, 4, 3, 5, 4)), rng.normal(size=(2, 2, 3, 2, 3))
    expected = sum(
        np.einsum("btchw,fc->btfhw", x[:, t : t + 3, :, i : i + 4, j : j + 2], w[:, 1 - t, :, 1 - i, 2 - j])
        for t, i, j in np.ndindex(2, 2, 3)
    )
    for shapes in ((), (x.shape, w.shape)):
        np.testing.assert_allclose(conv3d2d.conv3d(T.constant(x), T.constant(w), *shapes).eval(), expected)


@pytest.mark.parametrize("mode", ["FAST_COMPILE", pytest.param("JAX", marks=NEEDS_JAX)])
def test_xlogx_and_xlogy0_equal_theano(mode):
    from theano.tensor.xlogx import xlogx

    x, y = T.dvectors("x", "y")
    f = theano.function([x, y], [xlogx(x), T.xlogx.xlogy0(x, y), T.grad(xlogx(x)[1:].sum(), x)[1:]], mode=mode)
    # As Theano 1.0.5 computed them.
    expected = [[0, 0, 1.38629436], [0, -np.inf, 1.38629436], [1, 1.69314718]]
    for result, value in zip(f([0, 1, 2], [0, 0, 2]), expected, strict=True):
        np.testing.assert_allclose(result, value)


@pytest.mark.parametrize("mode", ["FAST_COMPILE", pytest.param("JAX", marks=NEEDS_JAX)])
def test_qr_has_theanos_shapes(mode):
    x, value = T.dmatrix("x"), np.arange(12.0).reshape(4, 3) ** 2
    outputs = [*T.nlinalg.qr(x), *T.nlinalg.qr(x, mode="complete"), T.nlinalg.qr(x, mode="r")]
    expected = [*np.linalg.qr(value), *np.linalg.qr(value, "complete"), np.linalg.qr(value, "r")]
    for result, reference in zip(theano.function([x], outputs, mode=mode)(value), expected, strict=True):
        np.testing.assert_allclose(abs(result), abs(reference), atol=1e-12)


def test_as_op_makes_an_op():
    from theano.compile.ops import as_op

    @as_op(itypes=[T.dvector], otypes=[T.dvector])
    def double(x):
        return 2 * x

    x = T.dvector("x")
    assert theano.function([x], double(x), mode="FAST_COMPILE")([1, 2]).tolist() == [2, 4]


def test_graphs_are_cloned_and_compared():
    x, y = T.dvectors("x", "y")
    graph = T.exp(x) * 2
    assert theano.gof.graph.is_same_graph(theano.clone(graph, {x: y}), T.exp(y) * 2)
    assert theano.gof.graph.is_same_graph(graph, T.exp(y) * 2, givens={x: y})
    assert not theano.gof.graph.is_same_graph(graph, T.exp(y) * 2)
    assert x in theano.gof.graph.inputs([graph])


def test_scan_and_reduce_return_updates():
    x = T.dvector("x")
    states, updates = theano.scan(lambda a, total: total + a, sequences=[x], outputs_info=[T.zeros(())])
    assert dict(updates) == {}
    f = theano.function([x], states, mode="FAST_COMPILE")
    np.testing.assert_array_equal(f([1.0, 2, 3]), [1, 3, 6])
    total, _ = theano.reduce(lambda a, total: total + a, x, T.zeros(()))
    assert theano.function([x], total, mode="FAST_COMPILE")([1.0, 2, 3]) == 6
    a, b = theano.shared(0.0), theano.shared(0.0)
    _, updates = theano.scan(lambda: {a: a + 1}, n_steps=3)
    theano.function([], updates=updates + [(b, b + 2)], mode="FAST_COMPILE")()
    assert a.get_value() == 3 and b.get_value() == 2
    assert list([(b, b + 2)] + updates) == [b, a]


def test_loops_and_random_states_have_theanos_classes():
    # Blocks finds loops and parameters in a graph by these classes.
    from theano.scan_module.scan_op import Scan
    from theano.tensor.shared_randomstreams import RandomStateSharedVariable

    states, _ = theano.scan(lambda a, total: total + a, sequences=[T.dvector("x")], outputs_info=[T.zeros(())])
    nodes = theano.gof.graph.io_toposort(theano.gof.graph.inputs([states]), [states])
    loops = [node.op for node in nodes if isinstance(node.op, Scan)]
    assert len(loops) == 1 and len(loops[0].outputs) == 1
    streams = theano.tensor.shared_randomstreams.RandomStreams(1)
    streams.normal()
    assert isinstance(streams.state_updates[0][0], RandomStateSharedVariable)
    assert not isinstance(theano.shared(np.zeros(2)), RandomStateSharedVariable)


def test_sparse_products_and_gradients_equal_dense_ones():
    import scipy.sparse
    import theano.sparse

    x, w = theano.sparse.csr_matrix("x", dtype="float64"), theano.shared(np.arange(6.0).reshape(3, 2), "w")
    cost = (theano.sparse.structured_dot(x, w) ** 2).sum()
    f = theano.function([x], [cost, T.grad(cost, w), theano.sparse.dense_from_sparse(x)], mode="FAST_COMPILE")
    dense = np.array([[1.0, 0, 2], [0, 0, 3], [0, 4, 0], [1, 0, 0]])
    product = dense @ w.get_value()
    for result, expected in zip(
        f(scipy.sparse.csr_matrix(dense)), [(product**2).sum(), 2 * dense.T @ product, dense], strict=True
    ):
        np.testing.assert_allclose(result, expected)


def test_small_names_are_theanos():
    # Of Blocks, pylearn2 and theano_lstm.
    assert theano._asarray([1, 2], dtype="floatX").dtype == theano.config.floatX
    assert theano._asarray([1, 2], "int8").dtype == "int8"
    assert T.Tensor("float32", (False, True))("x").ndim == 2
    assert T.hashtype(T.dmatrix("x")) == T.hashtype(T.dvector("y")) != T.hashtype(1)
    pool = theano.tensor.signal.pool.Pool
    x = np.zeros((1, 2, 7, 9))
    for arguments in ({"ws": (2, 3)}, {"ds": (2, 3), "ignore_border": True, "st": (1, 2), "pad": (1, 1)}):
        shape = pool.out_shape(x.shape, **arguments)
        pooled = theano.tensor.signal.pool.pool_2d(T.constant(x), **{"ignore_border": False, **arguments})
        assert tuple(shape) == pooled.eval(mode="FAST_COMPILE").shape


def test_ifelse_selects_a_branch():
    from theano.ifelse import ifelse

    x = T.dscalar("x")
    f = theano.function([x], ifelse(T.gt(x, 0), x, -2 * x), mode="FAST_COMPILE")
    assert f(3) == 3 and f(-3) == 6


@pytest.mark.filterwarnings("ignore:.*should implement `pullback`")
def test_user_defined_op_has_a_shape_and_a_gradient():
    class Double(theano.Op):
        __props__ = ()

        def make_node(self, x):
            x = T.as_tensor_variable(x)
            return theano.Apply(self, [x], [x.type()])

        def perform(self, node, inputs, outputs):
            outputs[0][0] = inputs[0] * 2

        def infer_shape(self, node, shapes):
            return shapes

        def grad(self, inputs, gradients):
            return [gradients[0] * 2]

    x = T.dvector("x")
    f = theano.function([x], [Double()(x).shape[0], T.grad(Double()(x).sum(), x)], mode="FAST_COMPILE")
    length, gradient = f([1.0, 2])
    assert length == 2 and gradient.tolist() == [2, 2]


@pytest.mark.parametrize("k, expected", [(2, [5, 7]), (-2, [1, 3])])
def test_topk_finds_the_largest_elements(k, expected):
    values = np.array([[7.0, 1, 5, 3]])
    top, where = T.topk(values, k).eval(mode="FAST_COMPILE"), T.argtopk(values, k).eval(mode="FAST_COMPILE")
    assert sorted(top[0]) == expected and sorted(values[0, where[0]]) == expected


@pytest.mark.filterwarnings("ignore:Skipping:UserWarning")
@pytest.mark.parametrize("mode", ["FAST_COMPILE", "JAX"])
def test_topk_refuses_more_elements_than_the_axis_has(mode):
    x, k = T.dvector("x"), T.iscalar("k")
    f = theano.function([x, k], T.topk(x, k), mode=mode)
    assert sorted(f([3, 1, 2], 3)) == [1, 2, 3]
    for n in (4, 0, -4):
        for compute in (
            lambda n=n: f([3, 1, 2], n),
            lambda n=n: theano.function([x], T.topk(x, n), mode=mode)([3, 1, 2]),
        ):
            with pytest.raises(ValueError, match="topk: expected kth between 1 and the length"):
                compute()


def test_failed_decompositions_raise_linalg_errors():
    a, b = T.dmatrix("a"), T.dvector("b")
    outputs = [T.slinalg.cholesky(a), T.grad(T.slinalg.cholesky(a).sum(), a)]
    outputs += [T.slinalg.solve(a, b), T.slinalg.solve_symmetric(a, b), T.slinalg.solve_lower_triangular(a, b)]
    for output in outputs:
        f = theano.function([a, b], output, mode="FAST_COMPILE", on_unused_input="ignore")
        assert np.isfinite(f(np.eye(2), np.ones(2))).all()
        with pytest.raises(np.linalg.LinAlgError, match="the matrix is"):
            f(np.zeros((2, 2)), np.ones(2))
    unchecked = T.slinalg.cholesky(a, on_error="nan").eval({a: -np.eye(2)}, mode="FAST_COMPILE")
    assert np.isnan(unchecked).any()


def test_joined_updates_of_one_variable_are_refused():
    w, v = theano.shared(1.0, "w"), theano.shared(1.0, "v")
    updates, other = theano.OrderedUpdates([(w, w + 1)]), theano.OrderedUpdates([(v, v + 1)])
    assert list(updates + other) == list({w: updates[w]} + other) == [w, v] and updates + updates == updates
    for join in (lambda: updates + {w: w * 2}, lambda: {w: w * 2} + updates, lambda: updates.update({w: w * 2})):
        with pytest.raises(KeyError, match="Collision"):
            join()


# -- flags -----------------------------------------------------------------------------------------------------------


#: All that Theano 1.0.5 has.
THEANOS_FLAGS = """
DebugMode.check_c DebugMode.check_finite DebugMode.check_preallocated_output DebugMode.check_preallocated_output_ndim
DebugMode.check_py DebugMode.check_strides DebugMode.patience DebugMode.warn_input_not_reused NanGuardMode.action
NanGuardMode.big_is_error NanGuardMode.inf_is_error NanGuardMode.nan_is_error allow_gc assert_no_cpu_op
base_compiledir blas.check_openmp blas.ldflags cache_optimizations cast_policy check_input check_stack_trace
cmodule.age_thresh_use cmodule.compilation_warning cmodule.debug cmodule.preload_cache cmodule.remove_gxx_opt
cmodule.warn_no_version compile.timeout compile.wait compiledir compiledir_format compute_test_value
compute_test_value_opt contexts conv.assert_shape ctc.root cuda.include_path cuda.root cxx cycle_detection
deterministic device dnn.base_path dnn.bin_path dnn.conv.algo_bwd dnn.conv.algo_bwd_data dnn.conv.algo_bwd_filter
dnn.conv.algo_fwd dnn.conv.precision dnn.conv.workmem dnn.conv.workmem_bwd dnn.enabled dnn.include_path
dnn.library_path exception_verbosity experimental.local_alloc_elemwise experimental.local_alloc_elemwise_assert
experimental.unpickle_gpu_on_cpu floatX force_device gcc.cxxflags gpu.local_elemwise_fusion gpuarray.cache_path
gpuarray.preallocate gpuarray.sched gpuarray.single_stream gpuarray.sync gpuelemwise.sync init_gpu_device int_division
lib.amdlibm linker magma.enabled magma.include_path magma.library_path metaopt.optimizer_excluding
metaopt.optimizer_including metaopt.verbose mode nocleanup numpy.seterr_all numpy.seterr_divide numpy.seterr_invalid
numpy.seterr_over numpy.seterr_under on_opt_error on_shape_error on_unused_input openmp openmp_elemwise_minsize
optdb.max_use_ratio optdb.position_cutoff optimizer optimizer_excluding optimizer_including optimizer_requiring
optimizer_verbose pickle_test_value print_active_device print_global_stats print_test_value profile profile_memory
profile_optimizer profiling.debugprint profiling.destination profiling.ignore_first_call profiling.min_memory_size
profiling.min_peak_memory profiling.n_apply profiling.n_ops profiling.output_line_width profiling.time_thunks
reoptimize_unpickled_function scan.allow_gc scan.allow_output_prealloc scan.debug tensor.cmp_sloppy
tensor.insert_inplace_optimizer_validate_nb tensor.local_elemwise_fusion traceback.compile_limit traceback.limit
unittests.rseed unpickle_function vm.lazy warn.argmax_pushdown_bug warn.gpu_set_subtensor1 warn.gpusum_01_011_0111_bug
warn.identify_1pexp_bug warn.ignore_bug_before warn.inc_set_subtensor1 warn.inc_subtensor1_opt warn.reduce_join
warn.round warn.signal_conv2d_interface warn.subtensor_merge_bug warn.sum_div_dimshuffle_bug warn.sum_sum_bug
warn.vm_gc_bug warn_float64
"""


def test_every_flag_of_theano_can_be_read():
    config = Config(pytensor.config)
    for name in THEANOS_FLAGS.split():
        flag = config
        for part in name.split("."):
            flag = getattr(flag, part)
        assert not isinstance(flag, Config)


@pytest.mark.parametrize(
    "flags, given, expected",
    [
        ("", "", ""),
        ("floatX=float32,dnn.enabled=False", "", "floatX=float32"),
        ("device=cuda0,floatX=float32", "", "mode=JAX,floatX=float32"),
        ("device=cuda,mode=FAST_COMPILE", "", "mode=FAST_COMPILE"),
        ("deterministic=more,int_division=int", "", ""),
        ("device=cpu, gcc.cxxflags=-O1", "", "gcc__cxxflags=-O1"),
        ("floatX=float32", "floatX=float64", "floatX=float32,floatX=float64"),
    ],
)
def test_theano_flags_become_pytensor_flags(flags, given, expected):
    assert to_pytensor_flags(flags, given) == expected


def test_theano_flags_set_pytensors_configuration():
    code = "import synkhronos.compat, theano, pytensor; print(theano.config.floatX, pytensor.config.floatX)"
    assert run(code, THEANO_FLAGS="floatX=float32,device=cpu", PYTENSOR_FLAGS="") == "float32 float32"
    assert run(code, THEANO_FLAGS="floatX=float32", PYTENSOR_FLAGS="floatX=float64") == "float64 float64"


def test_configparser_exports_config_and_change_flags():
    from theano.configparser import change_flags, config

    assert config is theano.config and change_flags is theano.change_flags


def test_config_is_read_and_set():
    config = Config(pytensor.config)
    assert config.device == "cpu" and config.dnn.enabled == "False" and config.compute_test_value == "off"
    config.compute_test_value = "off"
    with pytest.raises(AttributeError, match="computes no test values"):
        config.compute_test_value = "warn"
    with pytest.raises(AttributeError, match="theano.config.nothing"):
        config.nothing = 1
    assert config.warn.round is False and config.warn.sum_div_dimshuffle_bug is False
    config.warn.round = True
    assert config.warn.round is True
    config.warn.round = False
    assert config.DebugMode.check_py is True and config.scan.allow_output_prealloc is True
    with pytest.raises(AttributeError, match="theano.config.warn.nothing"):
        config.warn.nothing  # noqa: B018
    config.optimizer = "fast_compile"
    with config.change_flags(optimizer="None"):
        assert config.optimizer == "fast_compile"
    config.optimizer = "fast_run"
    before = pytensor.config.floatX
    from theano import change_flags

    with change_flags(floatX="float32"):
        assert config.floatX == pytensor.config.floatX == "float32"
    with config.change_flags(**{"profiling.n_apply": 7, "warn.round": True}):
        assert config.profiling.n_apply == 7 and config.warn.round is False
    assert pytensor.config.floatX == before
    config.floatX = before


@pytest.mark.parametrize(
    ("flags", "expected"),
    [("", "mode=JAX"), ("xmode=NUMBA, mode=C", "xmode=NUMBA, mode=C"), ("xmode=NUMBA", "xmode=NUMBA,mode=JAX")],
)
def test_default_flag_is_set_unless_the_user_has_set_it(monkeypatch, flags, expected):
    monkeypatch.setenv("SOME_FLAGS", flags)
    theano_import._set_default_flag("SOME_FLAGS", "mode", "JAX")
    assert os.environ["SOME_FLAGS"] == expected


# -- which library ---------------------------------------------------------------------------------------------------


def test_unknown_library_setting_is_refused():
    code = """
    try:
        import synkhronos.compat
    except ValueError as error:
        print(error)
    """
    assert (
        run(code, SYNKHRONOS_THEANO="tensorflow")
        == "SYNKHRONOS_THEANO has to be 'theano' or 'pytensor', not 'tensorflow'"
    )


def test_library_setting_selects_theano_or_pytensor(tmp_path):
    (tmp_path / "theano").mkdir()
    (tmp_path / "theano" / "__init__.py").write_text("__version__ = 'its own'\n")
    code = "import synkhronos.compat, theano; print(synkhronos.compat.library, theano.__version__)"
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")]), os.getcwd()])
    assert run(code, PYTHONPATH=path) == "theano its own"
    assert run(code, PYTHONPATH=path, SYNKHRONOS_THEANO="pytensor") == "pytensor 1.0.5"


def test_compat_refuses_to_replace_an_imported_theano(tmp_path):
    (tmp_path / "theano.py").write_text("")
    code = """
    import theano
    try:
        import synkhronos.compat
    except ImportError as error:
        print(error)
    """
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")]), os.getcwd()])
    assert "import synkhronos.compat before theano" in run(code, PYTHONPATH=path, SYNKHRONOS_THEANO="pytensor")


# -- python -m synkhronos --------------------------------------------------------------------------------------------

SCRIPT = """
import sys
import theano, theano.tensor as T
import beside
print(__name__, sys.argv[1:], theano.config.floatX, beside.NAME)
"""


def test_theano_script_runs_unchanged(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "beside.py").write_text("NAME = 'beside'\n")
    path = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))
    variables = {**os.environ, "PYTHONPATH": path, "THEANO_FLAGS": "floatX=float32", "PYTENSOR_FLAGS": ""}

    def start(*arguments):
        command = [sys.executable, "-m", "synkhronos", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=100, env=variables, cwd=tmp_path)

    expected = "__main__ ['--epochs', '3', '-m'] float32 beside"
    assert start("script.py", "--epochs", "3", "-m").stdout.strip() == expected
    assert start("--theano", "pytensor", "script.py", "--epochs", "3", "-m").stdout.strip() == expected
    assert start("-m", "script", "--epochs", "3", "-m").stdout.strip() == expected
    for nothing, message in (
        ("tran", "'tran' is neither a command nor a script; similar: train"),
        ("", "expected a command or a script"),
    ):
        done = start(*nothing.split())
        assert done.returncode == 2
        assert message in done.stderr and "python -m synkhronos train SESSION\n" in done.stderr
    assert "usage: python -m synkhronos" in start("--help").stdout
    assert re.fullmatch(r"synkhronos \d+\.\d+\.\d+\n", start("--version").stdout)
    assert start("--theano", "jax", "script.py").returncode == 2
