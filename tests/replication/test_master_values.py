"""Warnings of values that the user has set on the master alone."""

import warnings
import weakref

import numpy as np
import pytest
from library import fork_ranks, shared
from library import tensor as T

import synkhronos as synk
from synkhronos import exchange_rules
from synkhronos.graph_libraries import get_library
from synkhronos.replication import replicator
from synkhronos.training import make_train_function, make_trainer
from synkhronos.training.updates import sgd

X = np.ones((4, 3))


@pytest.fixture
def w(two_ranks):
    return shared(np.ones(3), "w")


def make_function(*values, **kwargs):
    """Return a function that sums its rows, multiplied by shared variables; the ranks have copies of these."""
    x = T.dmatrix("x")
    f = synk.function([x], ((x * sum(values)).sum(), "sum"), **kwargs)
    list_warnings(f)
    return f


def list_warnings(f, *args, **kwargs):
    """Return the texts of the warnings of a call; by default, of the rows."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        f(*args or [X], **kwargs)
    caught = [warning for warning in caught if "set_value" in str(warning.message)]
    assert all(warning.category is RuntimeWarning for warning in caught)
    return [str(warning.message) for warning in caught]


def test_call_warns_once_of_a_value_on_the_master_alone(w):
    f, g = make_function(w, name="loss"), make_function(w)
    w.set_value(np.zeros(3))
    with pytest.warns(RuntimeWarning, match=r"loss reads 'w', .* on rank 0 alone: synkhronos.broadcast\(\)") as caught:
        assert f(X) == 6  # two rows of rank 1
    assert caught[0].filename == __file__
    w.set_value(np.full(3, 2.0))
    assert list_warnings(f) == list_warnings(g) == []


def test_call_warns_of_an_update_by_as_theano(w):
    f = make_function(w, updates=[(w, w * 2)])
    f.as_theano(X)
    (warning,) = list_warnings(f)
    assert "'w', which set_value() or as_theano() has changed on rank 0 alone" in warning


def test_first_call_of_a_function_warns_if_the_ranks_have_the_variable(w):
    make_function(w)
    w.set_value(np.zeros(3))
    x = T.dmatrix("x")
    assert len(list_warnings(synk.function([x], ((x * w).sum(), "sum")))) == 1


@pytest.mark.parametrize("index", [0, 1])
def test_value_is_reported_whichever_function_runs_between(w, index):
    functions = [make_function(w), make_function(shared(np.ones(3)))]
    w.set_value(np.zeros(3))
    assert [len(list_warnings(f)) for f in (functions[index], functions[0], functions[1])] == [1 - index, index, 0]


def test_array_that_is_changed_in_place_is_reported(w):
    f = make_function(w)
    value = w.get_value()
    w.set_value(value, borrow=True)
    assert list_warnings(f) == []
    value *= 2
    w.set_value(value, borrow=True)
    assert len(list_warnings(f)) == 1


@pytest.mark.parametrize("value", [np.array(1, "int8"), np.zeros((0, 2)), np.array([True]), np.array([1j, np.nan])])
def test_equal_values_are_no_cause_for_a_warning(two_ranks, value):
    variable = shared(value, "value")
    read = synk.function([], (variable, "gather"))
    read()
    variable.set_value(value.copy())
    assert list_warnings(lambda _: read()) == []
    variable.set_value(np.zeros_like(value))
    assert len(list_warnings(lambda _: read())) == (value.size > 0)


def test_long_values_are_not_kept(w, monkeypatch):
    monkeypatch.setattr(replicator, "_MAX_KEPT_NBYTES", 16)
    f = make_function(w)
    value = weakref.ref(get_library(w).borrow_value(w))
    w.set_value(np.zeros(3))
    assert value() is None
    w.set_value(np.ones(3))
    assert list_warnings(f) == []
    w.set_value(np.zeros(3))
    assert len(list_warnings(f)) == 1


def test_training_step_warns(two_ranks):
    w, lr = shared(np.ones(3), "w"), shared(0.0, "lr")
    x, y = T.dmatrix("x"), T.dvector("y")
    train = make_train_function(((x.dot(w) - y) ** 2).mean(), [w], x, y, sgd, learning_rate=lr)
    train(X, np.ones(4))
    lr.set_value(0.5)
    (text,) = list_warnings(train, X, np.ones(4))
    assert "'lr'" in text
    synk.broadcast(lr, 0.25)
    w.set_value(np.zeros(3))
    (text,) = list_warnings(train.steps, X, np.ones(4), batches=[[0, 1], [2, 3]])
    assert "'w'" in text


def test_trainer_of_local_steps_warns(two_ranks):
    w, x, y = shared(np.ones(3), "w"), T.dmatrix("x"), T.dvector("y")
    loss = ((x.dot(w) - y) ** 2).mean()
    trainer = make_trainer(loss, [w], x, y, sgd, rule=exchange_rules.LocalSGD(), learning_rate=0.1)

    def train(n_epochs):
        for _ in trainer.epochs(X, np.ones(4), 1, n_epochs):
            pass

    train(1)
    w.set_value(np.zeros(3))
    with pytest.warns(RuntimeWarning, match="'w', .* on rank 0 alone") as caught:
        train(2)
    assert caught[0].filename == __file__
    assert list_warnings(train, 3) == []


def restore(w, f):
    old = w.get_value()
    w.set_value(np.zeros(3))
    f.as_theano(X)
    w.set_value(old)


def restore_value_after_local_updates(w, f):
    update = synk.function([T.dmatrix("x")], [], updates=[(w, w + 1)], on_unused_input="ignore")
    update(X[:1])  # on rank 0 alone
    restore(w, f)


def restart_after_as_theano(w, f):
    step = synk.function([], [], updates=[(w, w + 1)])
    synk.distribute()
    step.as_theano()
    w.set_value(np.ones(3))


def replace_on_all_ranks(w, f):
    w.set_value(np.zeros(3))
    synk.function([], [], updates=[(w, np.full(3, 2.0))])()


def set_on_every_rank(w, f):
    synk.set_value(1, w, np.zeros(3))
    w.set_value(np.full(3, 2.0))


def scatter_rows(w, f):
    synk.scatter(w, np.arange(6.0))
    w.set_value(np.zeros(3))


def set_in_a_program(w, f):
    synk.run(set_zeros, w)


def set_zeros(context, w):
    w.set_value(np.zeros(3))


@pytest.mark.parametrize(
    "change",
    [
        lambda w, f: (w.set_value(np.zeros(3)), synk.broadcast(w)),
        lambda w, f: (w.set_value(np.zeros(3)), synk.all_reduce(w)),
        lambda w, f: (w.set_value(np.zeros(3)), synk.gather(w)),
        lambda w, f: (synk.broadcast(w, np.zeros(3)), w.set_value(np.zeros(3))),
        lambda w, f: f.as_theano(X),
        restore,
        restore_value_after_local_updates,
        restart_after_as_theano,
        replace_on_all_ranks,
        set_on_every_rank,
        scatter_rows,
        set_in_a_program,
    ],
)
def test_correct_programs_cause_no_warning(w, change):
    f = make_function(w)
    change(w, f)
    assert list_warnings(f) == []


def test_values_that_the_master_alone_reads_cause_no_warning(w):
    x = T.dmatrix("x")
    f = synk.function([x], [(x * w).sum(), (x.sum(), "sum")], updates=[(w, x[0])])
    f(X)
    own = synk.function([x], [((x * w).sum(), None), (x.sum(), "sum")])
    given = synk.function([x], ((x * w).sum(), "sum"), givens=[(w, x[0])])
    w.set_value(np.zeros(3))
    assert list_warnings(own) == list_warnings(given) == []
    assert len(list_warnings(f)) == 1


def test_new_sessions_have_the_masters_values(two_ranks):
    w = shared(np.ones(3), "w")
    f = make_function(w)
    w.set_value(np.zeros(3))
    synk.close()
    w.set_value(np.full(3, 3.0))
    fork_ranks(2)
    assert list_warnings(f) == []
    w.set_value(np.zeros(3))
    assert len(list_warnings(f)) == 1
