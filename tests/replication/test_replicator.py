"""Copies of shared variables on the workers."""

import gc
import threading
import weakref

import numpy as np
import pytest
from library import NAME, package, shared
from library import tensor as T
from messages import raises

import synkhronos as synk
from synkhronos import ranks
from synkhronos.graph_libraries import get_library
from synkhronos.ranks import Command
from synkhronos.replication.replicator import Replicator


class ListSharedKeys(Command):
    """Command that returns the keys of all shared variables on each rank."""

    def run(self, rank):
        return rank.all_gather(sorted(key for key in rank.objects if isinstance(key, tuple) and key[0] == "shared"))


class ReadSharedValues(Command):
    """Command that returns the name and value of the shared variable of each key on each rank."""

    def __init__(self, keys):
        self.keys = keys

    def run(self, rank):
        shareds = [rank.get_object(key) for key in self.keys]
        return rank.all_gather([(shared.name, get_library(shared).borrow_value(shared).tolist()) for shared in shareds])


class Layer:
    """Object that can be pickled, but not unpickled."""

    def __setstate__(self, state):
        raise ValueError("unknown layer")


def get_replicator():
    return Replicator.get_or_create(ranks.get_session())


def test_replicator_is_unique_in_a_session(fork):
    fork(2)
    first = get_replicator()
    assert get_replicator() is first
    synk.close()
    fork(2)
    assert get_replicator() is not first


@pytest.mark.parametrize("n", [1, 3])
def test_replicator_gives_a_shared_variable_one_key(fork, n):
    fork(n)
    a, b = shared(np.arange(2.0), "a"), shared(np.arange(3.0), "b")
    assert get_replicator().get_key(a) is None
    get_replicator().send([], [a * b.sum()])
    keys = [get_replicator().get_key(a), get_replicator().get_key(b)]
    assert len(set(keys)) == 2
    described = ranks.get_session().run(ReadSharedValues(keys))
    assert described == [[("a", [0.0, 1.0]), ("b", [0.0, 1.0, 2.0])]] * n
    c = shared(1.0, "c")
    get_replicator().send([], [a.sum() + c])
    assert get_replicator().get_key(a) == keys[0]
    assert ranks.get_session().run(ListSharedKeys()) == [sorted([*keys, get_replicator().get_key(c)])] * n


def test_replicator_shares_variables_between_graphs(two_ranks_per_test):
    w = shared(1.0, "w")
    f = synk.function([], (w, "gather"), updates=[(w, w + 1)])
    f()
    synk.set_value(1, w, 10.0)
    g = synk.function([], (w * 1, "gather"), updates=[(w, w * 2)])
    np.testing.assert_array_equal(g(), [2, 10])
    np.testing.assert_array_equal(f(), [4, 20])
    assert len(ranks.get_session().run(ListSharedKeys())[1]) == 1


def test_replicator_drops_collected_shared_variables(two_ranks_per_test):
    w, v = shared(np.ones(1000), "w"), shared(1.0, "v")
    f = synk.function([], ((w * v).sum(), "sum"))
    f()
    keep = get_replicator().get_key(v)
    assert len(ranks.get_session().run(ListSharedKeys())[1]) == 2
    del f, w
    gc.collect()
    # The drop is sent with the next command, not from a finalizer.
    assert ranks.get_session().run(ListSharedKeys()) == [[keep], [keep]]
    g = synk.function([], (v, "gather"))
    np.testing.assert_array_equal(g(), [1, 1])


def test_replicator_keeps_shared_variables_in_use(two_ranks_per_test):
    w = shared(2.0, "w")
    f = synk.function([], (w * 2, "gather"))
    del w
    gc.collect()
    np.testing.assert_array_equal(f(), [4, 4])
    gc.collect()
    np.testing.assert_array_equal(f(), [4, 4])


def test_replicator_keeps_nothing_alive(two_ranks_per_test):
    w = shared(np.ones(3), "w")
    synk.function([], (w.sum(), "sum"))()
    reference = weakref.ref(w)
    del w
    gc.collect()
    assert reference() is None


def test_replicator_sends_values_unchanged(two_ranks_per_test):
    values = [
        np.arange(6.0).reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(12.0).reshape(2, 6)[:, ::2],
        np.zeros((0, 3)),
        np.array(5, "int16"),
        np.arange(4, dtype="float16"),
        np.array([True, False]),
        np.arange(2) * 1j,
    ]
    shareds = [shared(value, f"s{i}", borrow=True) for i, value in enumerate(values)]
    get_replicator().send([], shareds)
    described = ranks.get_session().run(ReadSharedValues([get_replicator().get_key(s) for s in shareds]))
    assert described[1] == described[0] == [(f"s{i}", value.tolist()) for i, value in enumerate(values)]


def test_replicator_copies_are_independent(two_ranks_per_test):
    value = np.arange(3.0)
    w = shared(value, "w", borrow=True)
    f = synk.function([], (w, "gather"))
    synk.distribute()
    value[:] = 0
    np.testing.assert_array_equal(f()[3:], [0, 1, 2])


def test_replicator_forgets_failed_sends(two_ranks_per_test):
    w = shared(1.0, "w")
    with raises(TypeError):
        get_replicator().send([(("extra", 1), threading.Lock())], [w])
    assert get_replicator().get_key(w) is None
    get_replicator().send([], [w])
    assert len(ranks.get_session().run(ListSharedKeys())[1]) == 1


def test_attributes_that_users_set_on_symbolic_variables_are_not_sent(fork):
    fork(2)
    x, w = T.dvector("x"), shared(2.0, "w")
    y = x * w
    for variable in (x, y):
        variable.layer = Layer()
        variable.layer.name = variable.name
    # The inner variables of a loop are pickled in another way.
    options = {"return_updates": False} if NAME == "pytensor" else {}
    doubled = package.scan(lambda a: a * 2, outputs_info=[y], n_steps=2, **options)
    doubled = doubled if NAME == "pytensor" else doubled[0]
    f = synk.function([x], (doubled[-1] + 1, "gather"))
    np.testing.assert_array_equal(f(np.arange(4.0)), np.arange(4.0) * 8 + 1)
    assert isinstance(x.layer, Layer)
