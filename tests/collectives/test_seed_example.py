"""The example on the manual's page on shared variables prints the documented output on two ranks."""

import numpy as np
import pytest
from library import shared
from library import tensor as T

import synkhronos as synk

PRINTED = """
s initial:
 [ 1.  1.]

s after Theano call:
 [ 10.  10.]

local s after reset and Synkhronos call:
 [ 3.  3.]

gathered s:
 [[ 3.  3.]
 [ 7.  7.]]

local s after in-place reduce:
 [ 10.  10.]

gathered s after reduce:
 [[ 10.  10.]
 [  7.   7.]]

gathered s after reset broadcast, Synkhronos call, and all-reduce:
 [[ 10.  10.]
 [ 10.  10.]]
"""


def run_example():
    """Run the statements of the page, in their order."""
    s_init = np.ones(2, dtype="float32")
    x = T.matrix("x", dtype="float32")  # the page's floatX
    s = shared(s_init, name="s")
    f = synk.function([x], updates=[(s, T.sum(x * s, axis=0))])
    synk.distribute()
    x_dat = synk.data(np.array([[1, 1], [2, 2], [3, 3], [4, 4]]).astype("float32"))
    print("\ns initial:\n", s.get_value())

    f.as_theano(x_dat.data)
    print("\ns after Theano call:\n", s.get_value())

    s.set_value(s_init)
    f(x_dat)
    print("\nlocal s after reset and Synkhronos call:\n", s.get_value())

    gathered_s = synk.gather(s, nd_up=1)
    print("\ngathered s:\n", gathered_s)

    synk.reduce(s, op="sum")
    print("\nlocal s after in-place reduce:\n", s.get_value())

    gathered_s = synk.gather(s, nd_up=1)
    print("\ngathered s after reduce:\n", gathered_s)

    synk.broadcast(s, s_init)
    f(x_dat)
    synk.all_reduce(s, op="sum")
    gathered_s = synk.gather(s, nd_up=1)
    print("\ngathered s after reset broadcast, Synkhronos call, and all-reduce:\n", gathered_s)
    return gathered_s


def test_example_prints_the_documented_output(capsys, two_ranks_per_test):
    with np.printoptions(legacy="1.13"):  # the page is of that time
        gathered = run_example()
    assert capsys.readouterr().out == PRINTED
    assert gathered.dtype == "float32"


def test_example_runs_twice_in_a_process(fork, capsys):
    # As a notebook's cells are.
    for _ in range(2):
        fork(2)
        with np.printoptions(legacy="1.13"):
            run_example()
        assert capsys.readouterr().out == PRINTED
        synk.close()


@pytest.mark.parametrize("n", [1, 3, 4])
def test_example_sum_does_not_depend_on_the_number_of_ranks(fork, n):
    fork(n)
    assert run_example().tolist() == [[10.0, 10.0]] * n
