"""A device that lives like a GPU, in one file: memory of its own, arithmetic of its own, collectives of its own."""

import itertools
import operator
import pickle
import weakref

import numpy as np

from synkhronos.devices import Communicator, Device
from synkhronos.devices.device import HostTransfers
from synkhronos.devices.reduce_op import REDUCE_OPS

#: The device's memory, by address: nothing but this module reads it.
MEMORY = {}
_addresses = itertools.count(1)
#: Number of operations on the device; tests check that it was used.
counts = {"launches": 0, "collectives": 0, "stores": 0}


class IslandArray:
    """An array on the island.  NumPy can't read it, and the host can't compute with it."""

    __array_ufunc__ = None

    def __init__(self, items):
        self.shape, self.dtype, self.size = items.shape, items.dtype, items.size
        self.address = next(_addresses)
        MEMORY[self.address] = items
        weakref.finalize(self, MEMORY.pop, self.address, None)

    def items(self):
        return MEMORY[self.address]

    def _launch(self, function, *operands):
        if any(isinstance(operand, np.ndarray) and operand.ndim for operand in operands):
            raise TypeError("an array of the host has to be copied to the island first")
        counts["launches"] += 1
        operands = [operand.items() if isinstance(operand, IslandArray) else operand for operand in operands]
        return IslandArray(np.array(function(self.items(), *operands)))

    def __add__(self, other):
        return self._launch(operator.add, other)

    def __sub__(self, other):
        return self._launch(operator.sub, other)

    def __mul__(self, other):
        return self._launch(operator.mul, other)

    def __truediv__(self, other):
        return self._launch(operator.truediv, other)

    def __eq__(self, other):
        return self._launch(operator.eq, other)

    __radd__, __rmul__, __hash__ = __add__, __mul__, None

    def __getitem__(self, index):
        return self._launch(operator.getitem, index)

    def astype(self, dtype):
        return self._launch(np.ndarray.astype, dtype)

    def reshape(self, *shape):
        return self._launch(np.ndarray.reshape, *shape)

    def all(self):
        return bool(self._launch(np.ndarray.all).items())


class Island(Device):
    """The device."""

    name = "island"
    has_arithmetic = True

    def owns(self, value):
        return isinstance(value, IslandArray)

    def to_numpy(self, value):
        return value.items().copy()

    def from_numpy(self, array):
        return IslandArray(np.array(array, order="C"))

    def concatenate(self, arrays):
        counts["launches"] += 1
        return IslandArray(np.concatenate([array.items() for array in arrays]))

    @property
    def transfers(self):
        return Ferry(self)

    # -- collectives: without these, arrays would be combined through the host ------------------------------

    def can_transfer_directly(self, dtype, op=None):
        return dtype.kind == "f"

    def get_communicator(self, rank):
        return rank.registry.get_or_create(Bridge, lambda: Bridge(rank))

    def as_writable(self, value, has_other_references):
        return value * 1 if has_other_references else value

    def rewrap(self, value, is_complete=False):
        """Return another object for memory that was written: the old one is invalid, as on a GPU."""
        new = IslandArray(value.items())
        value.address = None
        return new

    def slice_items(self, array, start, shape):
        return array.items().reshape(-1)[start : start + int(np.prod(shape))]


class Ferry(HostTransfers):
    """Copies between the island and host memory."""

    def write_segment(self, rank, segment_key, offset, value):
        counts["stores"] += 1
        super().write_segment(rank, segment_key, offset, value)


class Bridge(Communicator):
    """Collectives between islands, which the ranks have to connect first."""

    def __init__(self, rank):
        self._rank, self._generation = rank, 0

    @property
    def generation(self):
        return self._generation

    def connect(self, generations):
        if not self.generation or set(generations) != {self.generation}:
            self._rank.all_gather("connect")
            self._generation = max(generations) + 1

    def _send(self, array):
        """Return all ranks' items."""
        assert self.generation, "not connected"
        counts["collectives"] += 1
        return [pickle.loads(message) for message in self._rank.all_gather_bytes(pickle.dumps(array.items()))]

    def all_reduce(self, array, op):
        array.items()[...] = _reduce_arrays(op, self._send(array))

    def wait_briefly(self):
        return False

    def broadcast(self, array, root):
        array.items()[...] = self._send(array)[root]

    def reduce(self, array, op, root, out, layout, contributors):
        result = _reduce_arrays(op, self._send(array))
        if self._rank.number == root:
            out.items()[...] = result

    def reduce_scatter(self, array, op, bounds, out):
        start, stop = bounds[self._rank.number : self._rank.number + 2]
        out.items()[...] = _reduce_arrays(op, self._send(array)).reshape(-1)[start:stop].reshape(out.shape)

    def gather(self, array, root, layouts, out):
        self._copy(array, out or [])

    def all_gather(self, array, layouts, out):
        self._copy(array, out)

    def _copy(self, array, out):
        """Copy rank r's items into ``out[r]``."""
        for target, items in zip(out, self._send(array), strict=False):
            if target is not None:
                target[...] = items.reshape(target.shape)


def _reduce_arrays(op, arrays):
    reduced = REDUCE_OPS[op].ufunc.reduce(arrays)
    return reduced / len(arrays) if REDUCE_OPS[op].is_mean else reduced


DEVICE = Island()
