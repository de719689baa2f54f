"""Transfer of functions, variables and constants to the workers."""

import gc
import sys
import threading

import numpy as np
import pytest
from function_cases import CountFunctions
from library import INTERPRETED, XLA, PythonOp, shared
from library import tensor as T
from messages import raises

import synkhronos as synk
from synkhronos import ranks
from synkhronos.ranks.memory_table import MemoryTable
from synkhronos.ranks.rank import Rank

pytestmark = pytest.mark.usefixtures("rewrites")


class Unpicklable(PythonOp):
    """The identity, with a lock, which cannot be pickled."""

    def __init__(self):
        self.lock = threading.Lock()

    def compute(self, x):
        return x.copy()


# -- distributing ----------------------------------------------------------------------------------------------


def test_distribute_can_be_repeated(fork):
    fork(3)
    synk.distribute()  # nothing to send
    x = T.dvector("x")
    w = shared(1.0, "w")
    add = synk.function([x], updates=[(w, w + x.sum())])
    synk.distribute()
    add(np.arange(3.0))
    synk.distribute()
    np.testing.assert_array_equal(synk.gather(w), [1, 2, 3])
    other = shared(5.0, "other")
    sum_function = synk.function([], (w + other, "gather"))
    synk.distribute()
    np.testing.assert_array_equal(sum_function(), [6, 7, 8])
    np.testing.assert_array_equal(synk.gather(w), [1, 2, 3])


def test_distribute_sends_current_values(two_ranks_per_test):
    w = shared(1.0, "w")
    read = synk.function([], (w, "gather"))
    w.set_value(2.0)
    synk.distribute()
    w.set_value(3.0)
    with pytest.warns(RuntimeWarning, match="on rank 0 alone"):
        np.testing.assert_array_equal(read(), [3, 2])


def record_sizes(monkeypatch):
    """Record the sizes of all shared memory segments created from now on."""
    sizes = []
    create = MemoryTable.create_segment

    def counting(self, nbytes, *args, **kwargs):
        sizes.append(nbytes)
        return create(self, nbytes, *args, **kwargs)

    monkeypatch.setattr(MemoryTable, "create_segment", counting)
    return sizes


def test_large_shared_variable_is_sent_once(monkeypatch, two_ranks_per_test):
    sizes = record_sizes(monkeypatch)
    w = shared(np.ones(2_000_000), "w")
    functions = [synk.function([], ((w * i).sum(), "sum")) for i in range(3)]
    synk.distribute()
    functions += [synk.function([], ((w * i).sum(), "sum")) for i in range(3, 5)]
    synk.distribute()
    assert [float(f()) for f in functions] == [4e6 * i for i in range(5)]
    assert 16e6 <= sum(sizes) < 17e6


def test_large_constant_is_sent_once_per_distribute(monkeypatch, two_ranks_per_test):
    sizes = record_sizes(monkeypatch)
    c = T.constant(np.arange(2_000_000.0))
    x = T.dvector("x")
    functions = [synk.function([x], ((c.sum() * i + x.sum()), "avg")) for i in range(3)]
    synk.distribute()
    assert 16e6 <= sum(sizes) < 17e6
    assert functions[1](np.zeros(2)) == np.arange(2_000_000.0).sum()


def test_functions_work_after_close_and_fork(fork):
    x = T.dvector("x")
    fork(2)
    w = shared(1.0, "w")
    f = synk.function([x], (x * w, "gather"), updates=[(w, w + x.sum())])
    f(np.arange(4.0))
    synk.close()
    with raises(RuntimeError):
        f(np.arange(4.0))
    fork(3)
    # The new ranks start from the master's value, 1 + 0 + 1.
    np.testing.assert_array_equal(f(np.arange(4.0)), np.arange(4.0) * 2)
    np.testing.assert_array_equal(synk.gather(w), [3, 4, 5])
    np.testing.assert_array_equal(f(np.arange(3.0), num_slices=2), np.arange(3.0) * [3, 4, 5])


def test_workers_drop_collected_functions(two_ranks_per_test):
    x = T.dvector("x")
    f = synk.function([x], (x, "gather"))
    f(np.arange(4.0))
    before = ranks.get_session().run(CountFunctions())
    del f
    gc.collect()
    ranks.get_session().send_releases()
    after = ranks.get_session().run(CountFunctions())
    assert all(a == b - 1 for a, b in zip(after, before, strict=True))


# -- failing ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["distribute", "call"])
def test_unpicklable_graph_leaves_ranks_usable(how, two_ranks_per_test):
    x = T.dvector("x")
    w = shared(1.0, "w")
    f = synk.function([x], (Unpicklable()(x) * w, "gather"), name="nameless")
    with raises(TypeError, "nameless"):
        synk.distribute() if how == "distribute" else f(np.arange(4.0))
    del f
    gc.collect()
    synk.distribute()
    g = synk.function([x], (x * w, "gather"))
    np.testing.assert_array_equal(g(np.arange(4.0)), np.arange(4.0))


def test_distribute_to_one_rank_needs_no_pickle(fork):
    fork(1)
    x = T.dvector("x")
    f = synk.function([x], (Unpicklable()(x), "gather"), mode=INTERPRETED)
    np.testing.assert_array_equal(f(np.arange(4.0)), np.arange(4.0))


def test_slow_compilation_is_reported_once(fork, monkeypatch, caplog):
    monkeypatch.setattr(sys.modules["synkhronos.functions.slow_warning"], "WARN_AFTER_SECONDS", 0.0)
    fork(2)
    x = T.dvector("x")
    f = synk.function([x], (x.sum(), "sum"), name="slow")
    for _ in range(3):
        f(np.ones(6))
    messages = [record.getMessage() for record in caplog.records if "compiling slow" in record.getMessage()]
    ends = [message for message in messages if " took " in message]
    assert ends[0].startswith("compiling slow took ")
    # In the master only: the graph, and with XLA the shapes of its rows.
    assert len(ends) == (2 if XLA else 1)
    if XLA:
        f(np.ones(8))
        assert "for inputs of shapes [(4,)]" in caplog.records[-1].getMessage()


@pytest.mark.parametrize("is_function", [False, True])
def test_call_after_an_interrupted_distribution_sends_again(fork, monkeypatch, is_function):
    fork(2)
    x, w = T.dvector("x"), shared(np.ones(2), "w")
    f = synk.function([x], (x.sum() * w.sum(), "sum"))

    def interrupt(rank, key, value, is_weak=False, add_object=Rank.add_object):
        if (key[0] == "function") == is_function:
            raise KeyboardInterrupt
        add_object(rank, key, value, is_weak)

    monkeypatch.setattr(Rank, "add_object", interrupt)
    with pytest.raises(KeyboardInterrupt):
        f(np.arange(3.0))
    monkeypatch.undo()
    assert f(np.arange(3.0)) == 6
    np.testing.assert_array_equal(synk.gather(w), np.ones((2, 2)))
