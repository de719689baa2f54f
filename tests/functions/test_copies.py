"""Functions and training functions can be copied and pickled, as those of the graph libraries."""

import copy
import gc
import pickle

import numpy as np
import pytest
from library import function, shared
from library import tensor as T
from messages import raises

import synkhronos as synk
from synkhronos.training import make_train_function
from synkhronos.training.updates import adam

VALUE = np.arange(4.0)


def make_function(library_function=None):
    x, w = T.dvector("x"), shared(np.array(1.0), "w")
    outputs, updates = (x * w).sum(), [(w, w + 1)]
    if library_function is not None:
        return library_function([x], outputs, updates=updates), w
    return synk.function([x], (outputs, "sum"), updates=updates, name="f"), w


def copy_deeply(f):
    return copy.deepcopy(f)


def copy_by_pickle(f):
    return pickle.loads(pickle.dumps(f))


def test_function_copy_shares_variables(two_ranks_per_test):
    f, w = make_function()
    assert f(VALUE) == 6
    g = copy.copy(f)
    assert (g.name, g.output_modes) == ("f", ["sum"])
    assert [v is w for v in g.get_shared()] == [True]
    assert [float(h(VALUE)) for h in (g, f, g)] == [12, 18, 24]
    del f  # the copy does not need them
    gc.collect()
    synk.distribute()
    assert g(VALUE) == 30
    assert synk.gather(w).tolist() == [6, 6]


def test_attributes_of_plain_functions(two_ranks_per_test, capsys):
    f, w = make_function()
    assert any(variable.name == w.name for variable in f.maker.fgraph.variables)
    f.dprint(print_type=True)
    assert "Sum" in capsys.readouterr().out
    assert not hasattr(f, "copy")
    with raises(AttributeError, "copy"):
        f.copy(swap={w: shared(np.array(2.0))})


@pytest.mark.parametrize("duplicate", [copy_deeply, copy_by_pickle])
@pytest.mark.parametrize("called", [True, False])
def test_deep_copy_copies_shared_variables(duplicate, called, two_ranks_per_test):
    results = []
    for f, w in (make_function(), make_function(function)):
        if called:
            f(VALUE)
        g = duplicate(f)
        results.append([float(h(VALUE)) for h in (g, g, f, g)] + [float(w.get_value())])
    np.testing.assert_array_equal(*results)
    assert synk.gather(g_shared := duplicate(make_function()[0]).get_shared()[0]).tolist() == [1, 1], g_shared


def test_function_pickle_works_with_other_ranks(fork):
    fork(2)
    f, _ = make_function()
    f(VALUE)
    synk.close()
    pickled = pickle.dumps(f)
    g = pickle.loads(pickled)
    with raises(RuntimeError):
        g(VALUE)
    fork(3)
    assert [float(g(VALUE)), float(g(VALUE)), float(f(VALUE))] == [12, 18, 12]


def test_function_of_a_deep_graph_is_picklable(two_ranks_per_test):
    x = T.dvector("x")
    y = x
    for _ in range(400):
        y = y + 1
    f = synk.function([x], (y.sum(), "sum"), mode="FAST_COMPILE")
    assert copy_by_pickle(f)(VALUE) == 1606


def make_adam_function():
    x, y, w = T.dmatrix("x"), T.dvector("y"), shared(np.zeros(3), "w")
    loss = ((T.dot(x, w) - y) ** 2).mean()
    return make_train_function(loss, [w], x, y, adam, learning_rate=0.1), w


DATA = np.random.default_rng(0).normal(size=(7, 3)), np.arange(7.0)


@pytest.mark.parametrize("duplicate", [copy_deeply, copy_by_pickle])
def test_deep_copy_of_a_training_function_is_independent(duplicate, two_ranks_per_test):
    train, w = make_adam_function()
    losses = [float(train(*DATA)) for _ in range(2)]
    other = duplicate(train)
    first_losses = [float(train(*DATA)) for _ in range(3)]
    assert [float(other(*DATA)) for _ in range(3)] == first_losses
    again, _ = make_adam_function()
    np.testing.assert_allclose([float(again(*DATA)) for _ in range(5)], losses + first_losses, rtol=1e-12)


def test_copy_of_a_training_function_shares_its_state(two_ranks_per_test):
    train, _ = make_adam_function()
    other = copy.copy(train)
    losses = [float(f(*DATA)) for f in (train, other)]
    del train
    gc.collect()
    losses.append(float(other(*DATA)))
    again, _ = make_adam_function()
    np.testing.assert_allclose([float(again(*DATA)) for _ in range(3)], losses, rtol=1e-12)
