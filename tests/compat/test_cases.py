"""Random cases computed by Theano 1.0.5 are equal on PyTensor: values, gradients, second derivatives.

``tests/support/tables/make_theano_tables.py cases`` wrote the numbers, in Theano's environment.
"""

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pytensor")

import cases


def read_table():
    """Return, for each case, its outputs, gradients and second derivatives."""
    with np.load(Path(__file__).parent / "theano_cases.npz") as file:
        index, values = json.loads(str(file["index"])), file["values"]
    table, position = {}, 0
    for name, kinds in index.items():
        table[name] = {}
        for kind, shapes in kinds.items():
            table[name][kind] = []
            for shape in shapes:
                size = int(np.prod(shape))
                table[name][kind].append(values[position : position + size].reshape(shape))
                position += size
    return table


TABLE = read_table()


def check_case(case, mode):
    computed = case.compute(mode)
    expected = TABLE[case.name]
    assert {kind: len(values) for kind, values in computed.items()} == {
        kind: len(values) for kind, values in expected.items()
    }
    for kind, values in expected.items():
        for value, reference in zip(computed[kind], values, strict=True):
            value = np.asarray(value)
            assert value.shape == reference.shape
            np.testing.assert_allclose(value, reference, rtol=2e-5, atol=2e-5, err_msg=kind)


def test_all_cases_of_the_table_are_computed():
    assert TABLE.keys() == {case.name for case in cases.CASES}


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_compat_case_equals_theano(case):
    check_case(case, "FAST_COMPILE")
