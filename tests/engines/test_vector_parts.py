"""Long vectors, such as the flat gradient, whose parts XLA copies into the memory of the old value."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from library import XLA, limit_examples, shared
from library import tensor as T
from xla_launches import get_runner

import synkhronos as synk
from synkhronos.engines.xla import vector_parts

pytestmark = pytest.mark.skipif(not XLA, reason="about XLA programs")


@limit_examples(20)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(1, 10))
def test_parts_are_written_in_order(sizes, min_size):
    values = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    before, vector_parts.MIN_PART_ITEMS = vector_parts.MIN_PART_ITEMS, min_size
    try:
        vector = vector_parts.write_parts(np.zeros(sum(sizes), int), values)
    finally:
        vector_parts.MIN_PART_ITEMS = before
    assert np.asarray(vector).tolist() == list(range(sum(sizes)))


@pytest.mark.parametrize(
    ("min_nbytes", "build_value", "expected"),
    [
        (96, lambda x, g: T.concatenate([(2 * x).flatten(), x[0], g[:3] + 1]), True),
        (97, lambda x, g: T.concatenate([(2 * x).flatten(), x[0], g[:3] + 1]), False),  # a shorter vector
        (8, lambda x, g: T.concatenate([(2 * x).flatten(), x[0], g[:4] + 1]), False),  # another length
        (8, lambda x, g: g + x.sum(), False),  # no concatenation
    ],
)
def test_update_is_written_in_parts(fork, monkeypatch, min_nbytes, build_value, expected):
    monkeypatch.setattr(vector_parts, "MIN_NBYTES_IN_PLACE", min_nbytes)
    monkeypatch.setattr(vector_parts, "MIN_PART_ITEMS", 4)
    fork(1)
    x, g = T.dmatrix("x"), shared(np.arange(12.0), "g")
    values = np.arange(6.0).reshape(2, 3)
    f = synk.function([x], (x.sum(), "sum"), updates=[(g, build_value(x, g))])
    plain = synk.function([x], (build_value(x, g), None))
    new_value = np.asarray(plain(values))
    assert float(f(values)) == 15
    np.testing.assert_array_equal(g.get_value(), new_value)
    run = get_runner(f)
    text = run._program.lower(*run._get_arguments((values,))).as_text()
    assert bool(re.search(r"dynamic_update_slice.* -> tensor<12xf64>", text)) == expected


def test_update_of_parts_whose_lengths_are_inputs(fork, monkeypatch):
    monkeypatch.setattr(vector_parts, "MIN_NBYTES_IN_PLACE", 8)
    fork(1)
    n, g = T.lscalar("n"), shared(np.arange(5.0), "g")
    f = synk.function([], bcast_inputs=[n], updates=[(g, T.concatenate([-g[:n], g[n:]]))])
    for length, expected in [(2, [0, -1, 2, 3, 4]), (4, [0, 1, -2, -3, 4])]:
        f(length)
        assert g.get_value().tolist() == expected
