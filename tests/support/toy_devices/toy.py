"""A device in one file: arrays in host memory, in a class of their own that NumPy can't read."""

import numpy as np

from synkhronos.devices import Device
from synkhronos.devices.shared_memory_communicator import SharedMemoryCommunicator


class WrappedArray:
    """An array of the toy's."""

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

    # Without these two, arrays would be combined through the host.

    def can_communicate(self, dtype, op=None):
        return True

    def get_communicator(self, rank):
        return rank.registry.get_or_create(CountingCommunicator, lambda: CountingCommunicator(rank))

    def slice_items(self, array, start, shape):
        return WrappedArray(array.inside.reshape(-1)[start : start + int(np.prod(shape))].reshape(shape))


class CountingCommunicator(SharedMemoryCommunicator):
    """Reduces the wrapped NumPy arrays."""

    #: Number of arrays made; tests check that the device was used.
    count = 0

    def broadcast(self, array, root):
        CountingCommunicator.count += 1
        super().broadcast(array.inside, root)

    def all_reduce(self, array, op):
        CountingCommunicator.count += 1
        super().all_reduce(array.inside, op)

    def reduce(self, array, op, root, out, layout, contributors):
        CountingCommunicator.count += 1
        super().reduce(unwrap(array), op, root, unwrap(out), layout, contributors)

    def gather(self, array, root, layouts, out):
        CountingCommunicator.count += 1
        super().gather(unwrap(array), root, layouts, out and [unwrap(part) for part in out])

    def all_gather(self, array, layouts, out):
        CountingCommunicator.count += 1
        super().all_gather(unwrap(array), layouts, [unwrap(part) for part in out])


def unwrap(array):
    return None if array is None else array.inside


DEVICE = Toy()
