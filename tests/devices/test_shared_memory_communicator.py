"""The communicator of host memory, with ranks that are threads."""

import threading

import numpy as np
import pytest

from synkhronos.devices.reduce_op import divide_in_place
from synkhronos.devices.shared_memory_communicator import SharedMemoryCommunicator
from synkhronos.ranks import Rank
from synkhronos.ranks.control_memory import ControlMemory

N_RANKS, N_ITEMS = 4, 150_001  # more than one chunk


class Bytes:
    """Bytes that only ``copy_to`` reads, as those on a GPU."""

    def __init__(self, array):
        self._bytes = array.view(np.uint8)

    def copy_to(self, target, start=0):
        target[:] = self._bytes[start : start + target.size]


@pytest.mark.parametrize("contributors", [(0, 1, 2, 3), (1, 3), (2,)])
@pytest.mark.parametrize("make_source", [lambda array: array, Bytes])
def test_large_reduction_is_one_in_rank_order(make_source, contributors):
    arrays = np.random.default_rng(0).normal(size=(N_RANKS, N_ITEMS))
    control = ControlMemory(N_RANKS, 0.0)
    ranks = [Rank(r, 0, control, lambda: None, None) for r in range(N_RANKS)]
    out = np.zeros(N_ITEMS)

    def reduce(rank):
        rank.begin_command(1)
        source = make_source(arrays[rank.number]) if rank.number in contributors else None
        layout = arrays[0].shape, arrays.dtype
        SharedMemoryCommunicator(rank).reduce(source, "avg", 0, None if rank.number else out, layout, contributors)

    threads = [threading.Thread(target=reduce, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = sum(arrays[list(contributors[1:])], start=arrays[contributors[0]]) / len(contributors)
    assert np.array_equal(out, expected)


@pytest.mark.parametrize("dtype", "efdgD")
def test_mean_has_the_bits_of_a_division(dtype):
    limits = np.finfo(dtype)
    numbers = np.random.default_rng(0).normal(size=1000).astype(dtype)
    tiny = np.arange(1, 200) * limits.smallest_subnormal
    sums = np.concatenate([numbers, tiny, [limits.max, limits.tiny, np.inf, np.nan, -0.0]]).astype(dtype)
    for count in [*range(1, 18), 255, 256]:
        quotients = sums.copy()
        with np.errstate(invalid="ignore"):  # of complex infinity
            divide_in_place(quotients, count)
            expected = sums / sums.dtype.type(count)  # NumPy 1.23 divides a float16 by the int 256 as float32
        np.testing.assert_array_equal(quotients, expected)
        assert np.array_equal(np.signbit(quotients.real), np.signbit(expected.real))
