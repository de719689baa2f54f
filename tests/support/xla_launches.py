"""Parts of launches that tests of the XLA engine replace."""

import ctypes

import numpy as np
import pytest
from library import DEVICE

from synkhronos.devices.jax.ffi_collectives import CollectiveHandler
from synkhronos.function.computation import DEFAULT_VARIANT

on_host = pytest.mark.skipif(DEVICE == "gpu", reason="stands in for other ranks in host memory")


class Alarm(BaseException):
    """Raised by a signal handler."""


def get_runner(function):
    """Return the engine's runner of a function."""
    return function._computation.get_or_compile(DEFAULT_VARIANT).runner


def view_span(address, count, dtype):
    """Return the items at an address as an array."""
    dtype = np.dtype(dtype)
    return np.frombuffer((ctypes.c_char * (count * dtype.itemsize)).from_address(address), dtype)


class TwoEqualShards(CollectiveHandler):
    """Stand-in for the collectives of a sharded step between two ranks; this is rank 0, and rank 1 has its values.

    ``valid`` are the flags of the reduce-scatter and of the all-gather.
    """

    def __init__(self, valid=(1, 1)):
        self.valid, self.calls = list(valid), []

    def start(self, spans, stream):
        self.calls.append([span.n_items for span in spans])
        for source, target, count, dtype in spans:
            values = view_span(source, count, dtype)
            if len(self.valid) == 2:
                view_span(target, count // 2, dtype)[:] = values[: count // 2]
            else:
                view_span(target, 2 * count, dtype)[:] = np.tile(values, 2)

    def finish(self, spans, flag, stream):
        self.start(spans, stream)
        assert ctypes.c_int32.from_address(flag).value == 0
        ctypes.c_int32.from_address(flag).value = self.valid.pop(0)


class DoublingHandler(CollectiveHandler):
    """Stand-in for a second rank with the same values."""

    def __init__(self, calls=(), counts=1):
        self.calls, self.counts, self.begun, self.waits = [] if calls == () else calls, counts, [], 0

    def start(self, spans, stream):
        self.begun += spans

    def finish(self, spans, counts, stream):
        for source, target, count, dtype in [*self.begun, *spans]:
            view_span(target, count, dtype)[:] = 2 * view_span(source, count, dtype)
        self.calls.append([span.n_items for span in spans] if self.begun else spans[0].n_items)
        self.begun = []
        assert ctypes.c_int32.from_address(counts).value == 0
        ctypes.c_int32.from_address(counts).value = self.counts

    def order_after_started(self, stream):
        self.begun = []
        self.waits += 1
