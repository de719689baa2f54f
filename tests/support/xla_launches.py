"""Parts of launches that tests of the XLA engine replace."""

import ctypes

import numpy as np
import pytest
from library import DEVICE

from synkhronos.function.computation import DEFAULT_VARIANT

on_host = pytest.mark.skipif(DEVICE == "gpu", reason="stands in for other ranks in host memory")


class Alarm(BaseException):
    """Raised by a signal handler."""


def get_runner(function):
    """Return the engine's runner of a function."""
    return function._computation.compile(DEFAULT_VARIANT).runner


class DoublingReducer:
    """Stand-in for a second rank with the same values."""

    def __init__(self, calls=(), counts=1):
        self.calls, self.counts, self.begun, self.waits = [] if calls == () else calls, counts, [], 0

    def start(self, spans, stream):
        self.begun += spans

    def finish(self, spans, counts, stream):
        for source, target, count, dtype in [*self.begun, *spans]:
            dtype = np.dtype(dtype)
            items = [
                np.frombuffer((ctypes.c_char * (count * dtype.itemsize)).from_address(a), dtype)
                for a in (source, target)
            ]
            items[1][:] = items[0] + items[0]
        self.calls.append([span.n_items for span in spans] if self.begun else spans[0].n_items)
        self.begun = []
        assert ctypes.c_int32.from_address(counts).value == 0
        ctypes.c_int32.from_address(counts).value = self.counts

    def wait(self, stream):
        self.begun = []
        self.waits += 1
