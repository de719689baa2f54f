"""The shared memory that a command accesses, which other hosts need before they run it."""

from dataclasses import dataclass
from typing import Any

from synkhronos.functions.call import Call, ScatteredInput
from synkhronos.ranks import ArrayLocation, Command, RowAccess
from synkhronos.ranks.command import find_nested_row_accesses

A, B, C, D = (ArrayLocation(key, "i8", (6,)) for key in range(1, 5))


@dataclass(frozen=True)
class WithFields(Command):
    first: ArrayLocation
    rest: Any

    def run(self, rank):
        """Do nothing."""


class WithSlots(Command):
    __slots__ = ("array",)

    def __init__(self, array):
        self.array = array

    def run(self, rank):
        """Do nothing."""


def make_call(inputs, batch_s=None):
    return Call("key", None, False, inputs, 6, batch_s, 1, False)


def test_command_accesses_all_arrays_in_its_fields_by_default():
    command = WithFields(A, [(B, slice(1, 2)), range(3), "text", WithSlots(C)])
    assert list(command.find_row_accesses(2, range(1, 2))) == [RowAccess(A), RowAccess(B), RowAccess(C)]
    assert list(find_nested_row_accesses((command, D), 2, range(2)))[-1] == RowAccess(D)


def test_call_accesses_the_rows_of_its_ranks():
    call = make_call((ScatteredInput(A, range(6)), ScatteredInput(B, C, 2), D))
    expected = [RowAccess(A, range(2, 6)), RowAccess(B, C.slice_items(2, 6), 2), RowAccess(D)]
    assert list(call.find_row_accesses(3, range(1, 3))) == expected
    assert list(WithFields(A, [call]).find_row_accesses(3, range(1, 3))) == [RowAccess(A), *expected]


def test_call_accesses_only_the_selections_of_its_ranks():
    call = make_call((), batch_s=(A, slice(0, 2), B))
    assert list(call.find_row_accesses(3, range(1, 3))) == [RowAccess(B)]
