"""Freed memory is unmapped on all ranks, even if compilers have left garbage cycles there."""

import gc
import os

import numpy as np
import pytest
from library import DEVICE, INTERPRETED, NAME, PythonOp
from library import tensor as T
from system import run_code

import synkhronos as synk
from synkhronos import ranks


class Hoarder(PythonOp):
    """Op that returns its input, and leaves a garbage cycle with a reference to it, as Numba's compiler does."""

    def compute(self, x):
        cycle = [x]
        cycle.append(cycle)
        return x.copy()


def count_mappings(pid, nbytes):
    """Return the number of a process's shared mappings of this size."""
    with open(f"/proc/{pid}/maps") as lines:
        ends = [line.split()[0].split("-") for line in lines if line.split()[1].endswith("s")]
    return sum(int(end, 16) - int(start, 16) == nbytes for start, end in ends)


@pytest.mark.skipif(DEVICE != "host", reason="XLA copies what it is given")
def test_free_memory_collects_garbage_on_ranks(two_ranks_per_test):
    x = T.dvector("x")
    f = synk.function([x], (Hoarder()(x)[:1], "gather"), mode=INTERPRETED)
    d = synk.data(np.zeros(1 << 20))
    pids = [os.getpid(), *ranks.get_session().worker_pids.values()]
    gc.disable()  # as if no collection were triggered
    try:
        f(d)
        assert [count_mappings(pid, 1 << 23) for pid in pids] == [1, 1]
        d.free_memory()
        assert [count_mappings(pid, 1 << 23) for pid in pids] == [0, 0]
    finally:
        gc.enable()


@pytest.mark.skipif(NAME == "theano" or DEVICE != "host", reason="Numba's compiler")
@pytest.mark.slow
def test_free_memory_unmaps_after_numba_compiled(tmp_path):
    program = """
        import gc, os
        import numpy as np
        import pytensor.tensor as pt
        import synkhronos as synk
        from synkhronos import ranks
        from test_release import count_mappings

        gc.disable()  # as if no collection were triggered
        synk.fork(2, use_gpu=False)
        x = pt.dmatrix("x")
        f = synk.function([x], (pt.tanh(x * 1.5 + 7).sum(axis=0), "sum"), mode="NUMBA")
        d = synk.data(np.zeros((1 << 10, 1 << 10)))
        f(d)
        pids = [os.getpid(), *ranks.get_session().worker_pids.values()]
        print([count_mappings(pid, 1 << 23) for pid in pids])
        d.free_memory()
        print([count_mappings(pid, 1 << 23) for pid in pids])
    """
    flags = f"base_compiledir={tmp_path}"  # an empty cache
    assert run_code(program, timeout=120, PYTENSOR_FLAGS=flags) == "[1, 1]\n[0, 0]\n"
