"""Helpers of tests of functions: comparisons, selections of rows and a command."""

import numpy as np
from library import is_array

from synkhronos.ranks import Command

RNG = np.random.default_rng(7)


def assert_close(actual, expected):
    """Compare results that may differ by the order of additions."""
    assert is_array(actual)
    np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=1e-9)
    assert actual.dtype == expected.dtype


def select_rows(batch, length):
    """Return the row numbers that a batch selects by NumPy's indexing."""
    rows = np.arange(length)
    if batch is None:
        return rows
    if isinstance(batch, int):
        return rows[:batch]
    if isinstance(batch, list):
        return rows[np.array(batch, "int64")]
    return rows[batch]


X, Y = RNG.normal(size=(9, 2)), RNG.normal(size=9)


class CountFunctions(Command):
    """Command that returns the number of functions of each rank."""

    def run(self, rank):
        return rank.all_gather(sum(isinstance(key, tuple) and key[0] == "function" for key in rank.objects))
