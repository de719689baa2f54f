"""Buffers of a pickle in shared memory."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from synkhronos.ranks.pickle_buffers import measure_buffers, read_buffers, write_buffers


@given(st.lists(st.binary(max_size=200), min_size=1, max_size=20))
def test_pickle_buffers_round_trip_is_aligned(buffers):
    views = [memoryview(buffer) for buffer in buffers]
    memory = np.zeros(measure_buffers(views), np.uint8)
    write_buffers(views, memory.data)
    read = read_buffers(memory.data.toreadonly())
    assert list(map(bytes, read)) == buffers
    for view in read:
        if len(view):
            assert (np.frombuffer(view, np.uint8).ctypes.data - memory.ctypes.data) % 64 == 0
