"""A device in one file: arrays in host memory, in a class of their own that NumPy can't read."""

import numpy as np

from synkhronos.devices import Device
from synkhronos.devices.shared_memory_communicator import SharedMemoryCommunicator


class WrappedArray:
    """An array of the device."""

    def __init__(self, array):
        self.inside = array
        self.shape, self.dtype = array.shape, array.dtype


class Toy(Device):
    """The device: the required methods, and those by which ranks reduce these arrays on the device."""

    name = "toy"

    def owns(self, value):
        return isinstance(value, WrappedArray)

    def to_numpy(self, value):
        return value.inside

    def from_numpy(self, array):
        return WrappedArray(np.array(array, order="C"))

    # With these three methods, collectives read and write the device's arrays.  By default they copy through the host.

    def can_transfer_directly(self, dtype, op=None):
        return True

    def get_communicator(self, rank):
        return rank.registry.get_or_create(CountingCommunicator, lambda: CountingCommunicator(rank))

    def slice_items(self, array, start, shape):
        return WrappedArray(array.inside.reshape(-1)[start : start + int(np.prod(shape))].reshape(shape))


class CountingCommunicator(SharedMemoryCommunicator):
    """Reduces the wrapped NumPy arrays."""

    #: Number of calls of collectives on this rank; tests check that the device was used.
    n_collective_calls = 0

    def broadcast(self, array, root):
        CountingCommunicator.n_collective_calls += 1
        super().broadcast(array.inside, root)

    def all_reduce(self, array, op):
        CountingCommunicator.n_collective_calls += 1
        super().all_reduce(array.inside, op)

    def reduce(self, array, op, root, out, layout, contributors):
        CountingCommunicator.n_collective_calls += 1
        super().reduce(unwrap(array), op, root, unwrap(out), layout, contributors)

    def reduce_scatter(self, array, op, bounds, out):
        CountingCommunicator.n_collective_calls += 1
        super().reduce_scatter(array.inside, op, bounds, out.inside)

    def gather(self, array, root, layouts, out):
        CountingCommunicator.n_collective_calls += 1
        super().gather(unwrap(array), root, layouts, out and [unwrap(part) for part in out])

    def all_gather(self, array, layouts, out):
        CountingCommunicator.n_collective_calls += 1
        super().all_gather(unwrap(array), layouts, [unwrap(part) for part in out])


def unwrap(array):
    return None if array is None else array.inside


DEVICE = Toy()
