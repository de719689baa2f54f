"""Names of Theano-MPI, and of Theano's GPU code that its models use, with PyTensor and with Theano itself."""

import copy
import importlib.util
import os
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import theano
from theano.gof.graph import is_same_graph
from theano.gpuarray import dnn
from theano.tensor.nnet import conv2d
from theano.tensor.signal.pool import pool_2d

import synkhronos.compat
from synkhronos.compat import import_hooks

ROOT = Path(__file__).resolve().parents[2]
RNG = np.random.RandomState(0)
IMAGES, FILTERS = (RNG.normal(size=shape).astype("float32") for shape in ((2, 4, 7, 6), (6, 2, 3, 2)))


in_pytensor = pytest.mark.skipif(synkhronos.compat.library == "theano", reason="Theano's Ops are compiled by C++")


def evaluate_expression(expression):
    return np.asarray(theano.function([], expression, mode="FAST_COMPILE")())


@pytest.mark.parametrize("conv_mode", ["conv", "cross"])
@pytest.mark.parametrize("border", ["valid", "full", "half", 1, (2, 0)])
def test_dnn_conv_builds_the_graph_of_conv2d(border, conv_mode):
    x, w = theano.shared(IMAGES), theano.shared(FILTERS)
    output = dnn.dnn_conv(
        img=x, kerns=w, border_mode=border, subsample=(2, 1), conv_mode=conv_mode, algo="small", num_groups=2
    )
    flips = conv_mode == "conv"
    expected = conv2d(x, w, border_mode=border, subsample=(2, 1), filter_flip=flips, num_groups=2)
    assert is_same_graph(output, expected) and output.ndim == 4


@in_pytensor
def test_dnn_conv_cross_mode_equals_numpy():
    x, w = theano.shared(IMAGES[:, :2]), theano.shared(FILTERS)
    output = evaluate_expression(dnn.dnn_conv(x, w, dilation=(2, 2), conv_mode="cross"))
    windows = np.lib.stride_tricks.sliding_window_view(IMAGES[:, :2], (5, 3), (2, 3))[..., ::2, ::2]
    np.testing.assert_allclose(output, np.einsum("bcyxhw,ochw->boyx", windows, FILTERS), rtol=1e-4, atol=1e-5)


def test_dnn_conv_refuses_other_modes():
    with pytest.raises(ValueError, match="conv_mode: expected 'conv' or 'cross', got 'convolve'"):
        dnn.dnn_conv(theano.shared(IMAGES), theano.shared(FILTERS), conv_mode="convolve")


@pytest.mark.parametrize("mode", ["max", "max_deterministic", "sum", "average", "average_inc_pad", "average_exc_pad"])
def test_dnn_pool_builds_the_graph_of_pool_2d(mode):
    x = theano.shared(IMAGES)
    plain = {"max_deterministic": "max", "average": "average_inc_pad"}.get(mode, mode)
    expected = pool_2d(x, (3, 2), stride=(2, 2), pad=(1, 0), mode=plain, ignore_border=True)
    assert is_same_graph(dnn.dnn_pool(x, (3, 2), (2, 2), mode, (1, 0)), expected)
    # cuDNN's windows overlap by default, Theano's do not.
    expected = pool_2d(x, (3, 2), stride=(1, 1), mode=plain, ignore_border=True)
    assert is_same_graph(dnn.dnn_pool(x, ws=(3, 2), mode=mode), expected)
    assert dnn.dnn_pool(theano.shared(IMAGES[:, None]), (2, 2, 2), mode=mode).ndim == 5


@in_pytensor
def test_dnn_pool_windows_overlap_by_default():
    assert evaluate_expression(dnn.dnn_pool(theano.shared(IMAGES), (3, 2))).shape == (2, 4, 5, 5)


def test_shared_variables_have_a_sync_method():
    x = theano.shared(np.zeros(3, "float32"), "x")
    add = theano.function([], updates=[(x, x + 1)], mode="FAST_COMPILE")
    add()
    x.container.value.sync()
    # Else everything is as before: plain arrays, and the variable's own memory where it is borrowed.
    assert type(x.get_value()) is type(x.get_value(borrow=True)) is type(copy.deepcopy(x).get_value()) is np.ndarray
    assert np.shares_memory(x.get_value(borrow=True), x.container.value) and x.get_value().base is None
    x.container.value[...] = 5
    x.set_value(x.get_value() + 1)
    add()
    assert x.get_value().tolist() == [7, 7, 7]
    x.set_value(x.container.value, borrow=True)
    assert type(x.get_value(borrow=True)) is np.ndarray
    x.zero()
    assert x.get_value().tolist() == [0, 0, 0] and type(x.get_value(borrow=True)) is np.ndarray
    assert type(pickle.loads(pickle.dumps(x)).get_value()) is np.ndarray
    number = theano.shared(np.float32(3))
    number.container.value.sync()
    assert float(number.get_value()) == 3
    if synkhronos.compat.library == "pytensor":
        pytest.importorskip("jax")
        theano.function([], updates=[(x, x + 1)], mode="JAX")()
        x.container.value.sync()
        value = x.container.value
        assert value.dtype == "float32" and np.asarray(value).tolist() == [1, 1, 1]
        assert (len(value), value[0], value[1:].tolist()) == (3, 1, [1, 1])
        assert (1 - 2 * value).tolist() == (value - 2).tolist() == [-1, -1, -1] and float(value[:1][0]) == 1
        assert type(x.get_value()) is np.ndarray and x.get_value(return_internal_type=True).sum() == 3


def test_missing_hickle_is_named_when_it_is_called():
    if importlib.util.find_spec("hickle") is not None and "lost" not in importlib.util.find_spec("hickle").origin:
        pytest.skip("hickle is installed")
    import hickle

    for function in (hickle.load, hickle.dump):
        with pytest.raises(ImportError, match="needs hickle: pip install hickle"):
            function("a.hkl")


def run_program(cwd, *paths):
    command = [sys.executable, "-m", "synkhronos", "program.py"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, *paths)))}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=100)


def test_users_copy_of_theano_mpi_provides_layers_but_not_rules(tmp_path):
    user_copy = tmp_path / "theirs" / "theanompi"
    for folder in ("", "models", "lib"):
        (user_copy / folder).mkdir(parents=True, exist_ok=True)
        (user_copy / folder / "__init__.py").write_text("raise RuntimeError('mpi4py')\n" if not folder else "")
    (user_copy / "models" / "layers2.py").write_text("mine = 3\n")
    (user_copy / "lib" / "opt.py").write_text("also_mine = 4\n")
    (tmp_path / "program.py").write_text(
        textwrap.dedent("""
        from theanompi import BSP, EASGD, GOSGD
        import synkhronos
        print(issubclass(BSP, synkhronos.exchange_rules.BSP), BSP.sync_type, BSP.exch_strategy, GOSGD.__name__)
        try:
            import theanompi.models.layers2
        except ImportError as error:
            print(error)
        else:
            from theanompi.lib.opt import also_mine
            print(theanompi.models.layers2.mine, also_mine)
        """)
    )
    done = run_program(tmp_path, tmp_path / "theirs")
    assert done.stdout == "True cdd nccl32 GOSGD\n3 4\n", done.stderr
    done = run_program(tmp_path)
    assert "theanompi.models: layers, models and data are those of your copy of Theano-MPI" in done.stdout, done.stderr
    assert sum(getattr(finder, "hook", None) is import_hooks.find_theanompi for finder in sys.meta_path) == 1


def test_class_attributes_of_rules_become_settings(tmp_path, monkeypatch):
    from synkhronos.exchange_rules import Swap
    from synkhronos.launcher import background_run
    from synkhronos.theanompi.rules import BSP

    requested = []

    # The division by zero ends `init` as soon as the settings are recorded.
    monkeypatch.setattr(
        background_run, "resolve_settings", lambda sources, source_path: requested.append(sources[-1]) or 1 / 0
    )
    for rule_class, options in (
        (BSP, {"rule": "BSP", "rule_options": {"average": "gradient"}}),
        (type("BSP", (BSP,), {"sync_type": "avg"}), {"rule": "BSP", "rule_options": {"average": "params"}}),
        (type("BSP", (BSP,), {"sync_type": "swap"}), {"rule": "Swap", "rule_options": Swap().get_options()}),
        (
            type("BSP", (BSP,), {"exch_strategy": "nccl16"}),
            {"rule": "BSP", "rule_options": {"average": "gradient", "precision": "float16"}},
        ),
    ):
        with pytest.raises(ZeroDivisionError):
            rule_class().init(["cpu"], "models.mlp", "MLP")
        assert requested.pop() == {**options, "devices": ["cpu"], "modelfile": "models.mlp", "modelclass": "MLP"}
    with pytest.raises(RuntimeError, match=r"wait\(\): expected a call of init\(\) before it"):
        BSP().wait()
    with pytest.raises(ValueError, match="sync_type: expected one of avg, cdd, swap, got 'sum'"):
        type("BSP", (BSP,), {"sync_type": "sum"})().init(["cpu"], "models.mlp", "MLP")
