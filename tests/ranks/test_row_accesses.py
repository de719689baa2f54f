"""The shared memory that a command accesses, which other hosts need before they run it."""

import tracemalloc
from dataclasses import dataclass
from typing import Any

import numpy as np

from synkhronos.functions.call import Call, ScatteredInput
from synkhronos.ranks import ArrayLocation, Command, RowAccess

A, B, C, D = (ArrayLocation(key, "i8", (6,)) for key in range(1, 5))


@dataclass(frozen=True)
class WithFields(Command):
    first: ArrayLocation
    rest: Any

    def run(self, rank):
        """Do nothing."""


class WithAttributes(Command):
    def __init__(self, value):
        self.value = value

    def run(self, rank):
        """Do nothing."""


class WithSlots(Command):
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value

    def run(self, rank):
        """Do nothing."""


class WithInheritedSlots(WithSlots):
    __slots__ = ()


def make_call(inputs, batch_s=None):
    return Call("key", None, False, inputs, 6, batch_s, 1, False)


def test_command_accesses_all_arrays_in_its_pickle_by_default():
    command = WithFields(A, [(B, slice(1, 2)), range(3), {"text": WithAttributes({C})}, WithInheritedSlots(D)])
    assert list(command.find_row_accesses(2, range(1, 2))) == [RowAccess(array) for array in (A, B, C, D)]
    cyclic = WithAttributes([A])
    cyclic.value.append(cyclic.value)
    assert list(cyclic.find_row_accesses(2, range(1, 2))) == [RowAccess(A)]


def test_row_accesses_are_found_without_a_copy_of_the_command():
    command = WithAttributes([bytes(1 << 22), np.ones(1 << 19), A])
    tracemalloc.start()
    try:
        assert list(command.find_row_accesses(2, range(1, 2))) == [RowAccess(A)]
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_call_accesses_the_rows_of_its_ranks():
    call = make_call((ScatteredInput(A, range(6)), ScatteredInput(B, C, 2), D))
    expected = [RowAccess(A, range(2, 6)), RowAccess(B, C.slice_items(2, 6), 2), RowAccess(D)]
    assert list(call.find_row_accesses(3, range(1, 3))) == expected
    assert list(WithFields(A, [call]).find_row_accesses(3, range(1, 3))) == [RowAccess(A), *expected]


def test_call_accesses_only_the_selections_of_its_ranks():
    call = make_call((), batch_s=(A, slice(0, 2), B))
    assert list(call.find_row_accesses(3, range(1, 3))) == [RowAccess(B)]
