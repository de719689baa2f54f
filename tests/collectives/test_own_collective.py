"""A user-defined collective: a command that every rank runs, and a function that checks arguments and sends it."""

from dataclasses import dataclass

import numpy as np
import pytest
from library import shared
from messages import raises

import synkhronos as synk
from synkhronos import ranks
from synkhronos.collectives.all_reduce_command import AllReduce, _AllReducePlans
from synkhronos.collectives.arguments import parse_variables
from synkhronos.collectives.commands import prepare_replicas
from synkhronos.graph_libraries.library import get_storage
from synkhronos.ranks import Command
from synkhronos.replication.replicator import distribute_variables

pytestmark = pytest.mark.new_ranks  # workers that have imported the command


# collective begins
@dataclass(frozen=True, slots=True)
class Rotate(Command):
    """Set every rank's variables to the values of the rank before it."""

    keys: tuple

    def run(self, rank):
        replicas = prepare_replicas(rank, rank.get_objects(self.keys))
        for replica in replicas:
            replica.check_equal_layouts("rotate")
        for replica in replicas:
            out = [np.empty(*layout) for layout in replica.layouts]
            replica.communicator.all_gather(replica.get_contiguous(), replica.layouts, out)
            replica.set_value(replica.device.from_numpy(out[rank.number - 1]))


def rotate(shared_vars):
    """Run the command that sends each rank's values of the variables to the next rank."""
    session = ranks.get_session()
    with session.call_lock:
        session.wait_until_idle()
        variables, _ = parse_variables(session, shared_vars)
        session.run(Rotate(distribute_variables(session, variables)))


# collective ends


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("size", [3, 300_000])
def test_own_collective_shifts_values_by_one_rank(fork, n, size):
    fork(n)
    a, b = shared(np.zeros(size), "a"), shared(np.zeros((2, 2), "float32"), "b")
    f = synk.function([], [], updates=[(a, a + 1), (b, b)])
    synk.distribute()
    for r in range(n):
        synk.set_value(r, [a, b], [np.full(size, float(r)), np.full((2, 2), r, "float32")])
    rotate([a, b])
    for r in range(n):
        assert (np.asarray(synk.get_value(r, a)) == (r - 1) % n).all()
        assert (np.asarray(synk.get_value(r, b)) == (r - 1) % n).all(), f


def test_own_collective_refuses_wrong_arguments(two_ranks_per_test):
    s = shared(np.zeros(3), "s")
    with raises(ValueError, "shared_vars"):
        rotate(s)
    f = synk.function([], [], updates=[(s, s)])
    synk.set_value(1, s, np.zeros(4))
    with raises(ValueError, "rotate"):
        rotate(s)
    assert synk.get_shapes(s) == [(3,), (4,)], f


@dataclass(frozen=True, slots=True)
class ReduceAndNumber(Command):
    """Reduce variables, and return each rank's number.  The ranks in ``forgetful_ranks`` have no plan before."""

    all_reduce: AllReduce
    forgetful_ranks: tuple

    def run(self, rank):
        if rank.number in self.forgetful_ranks:
            rank.registry.get_or_create(_AllReducePlans).clear()
        return self.all_reduce.reduce_and_run(rank, lambda: rank.all_gather(rank.number), is_collective=True)


@pytest.mark.parametrize("forgetful_ranks", [(0,), (1,), (0, 2)])
def test_ranks_without_a_plan_of_a_small_all_reduce_make_new_plans_with_the_others(fork, forgetful_ranks):
    fork(3)
    s = shared(np.zeros(4), "s")
    f = synk.function([], [], updates=[(s, s)])
    synk.distribute()
    synk.all_reduce(s)
    session = ranks.get_session()
    for _ in range(3):
        for r in range(3):
            synk.set_value(r, s, np.full(4, float(r)))
        with session.call_lock:
            session.wait_until_idle()
            all_reduce = AllReduce(distribute_variables(session, [s]), "avg", True)
            assert session.run(ReduceAndNumber(all_reduce, forgetful_ranks)) == [0, 1, 2]
        for r in range(3):
            assert (np.asarray(synk.get_value(r, s)) == 1).all(), f


@dataclass(frozen=True, slots=True)
class CopyDtype(Command):
    """Set a variable on the last rank to an array whose dtype is equal to the others', but another object."""

    variable_keys: tuple

    def run(self, rank):
        if rank.number == rank.size - 1:
            (storage,) = map(get_storage, rank.get_objects(self.variable_keys))
            copy = np.empty(storage[0].shape, storage[0].dtype.newbyteorder("="))
            copy[...] = storage[0]
            assert copy.dtype is not storage[0].dtype
            storage[0] = copy


def test_all_reduce_of_small_arrays_compares_dtypes_by_value(fork):
    fork(2)
    a, b = shared(np.zeros(4), "a"), shared(np.zeros(3), "b")
    f = synk.function([], [], updates=[(a, a), (b, b)])
    synk.distribute()
    session = ranks.get_session()
    for has_plan in (False, True):
        for r in range(2):
            synk.set_value(r, [a, b], [np.full(4, r + 1.0), np.full(3, r + 1.0)])
        with session.call_lock:
            session.wait_until_idle()
            session.run(CopyDtype(distribute_variables(session, [b])))
        synk.all_reduce([a, b], "sum")
        for r in range(2):
            values = np.concatenate(synk.get_value(r, [a, b]))
            assert (values == 3).all(), (has_plan, values, f)
