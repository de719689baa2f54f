"""State of one rank's training, on which exchange rules operate.

A rule sees the parameters of a rank as one flat vector, `ExchangeState.vector`.  In host memory, rules process it in
blocks that fit into the processor's caches, and in place if the memory of the variables allows it.  On GPUs, rules
compute with the device's arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from synkhronos.devices import NUMPY, Device, find_device, get_array_device
from synkhronos.graph_libraries import get_library
from synkhronos.programs import LocalRows
from synkhronos.variable_types import Array, SharedVariable

#: Size of a block in bytes; a few blocks fit into the processor's caches.
BLOCK_NBYTES = 1 << 18
#: Key of `ExchangeState.own` that belongs to no rule: the trainer counts there the batches since the last exchange.
#: These weight running averages.  A fraction is the part of a batch whose rows this rank has.
BATCHES_KEY = "batches"


class FlatVariables:
    """Shared variables of floats, read and written as one flat vector of ``size`` elements.

    ``dtype`` is the widest dtype of the variables, ``shapes`` are their shapes.
    """

    def __init__(self, shareds: Sequence[SharedVariable]):
        self.shareds = list(shareds)
        values = self._borrow_values()
        self.shapes = [tuple(int(length) for length in value.shape) for value in values]
        self._dtypes = [np.dtype(shared.type.dtype) for shared in self.shareds]
        self.dtype = np.result_type(*self._dtypes) if self._dtypes else np.dtype(np.float32)
        ends = np.cumsum([0, *(int(np.prod(shape)) for shape in self.shapes)])
        self._bounds = list(zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True))
        self.size = int(ends[-1])

    def _borrow_values(self) -> list[Array]:
        return [get_library(shared).borrow_value(shared) for shared in self.shareds]

    @property
    def device(self) -> Device:
        """Device of the vector: the common device of the variables if its arrays have arithmetic, else host memory."""
        return _find_common_device(self._borrow_values())

    def get(self) -> Array:
        """Return the vector as a new array of `device`, of shape ``(size,)``."""
        values = self._borrow_values()
        device = _find_common_device(values)
        if device is not NUMPY:
            return device.pack(values, self.dtype)
        flat = [np.ravel(get_array_device(value).to_numpy(value)) for value in values]
        # Even a single variable is copied: its next update may change its memory in place.
        return np.concatenate(flat).astype(self.dtype, copy=False) if flat else np.zeros(0, self.dtype)

    def to_numpy(self) -> np.ndarray:
        """Return the vector as a NumPy array."""
        vector = self.get()
        return find_device(vector).to_numpy(vector)

    def set(self, vector: Array) -> None:
        """Set the variables from a vector of shape ``(size,)``.  Raise ValueError for another shape."""
        if tuple(vector.shape) != (self.size,):
            raise ValueError(f"expected a vector of {self.size} elements, got shape {tuple(vector.shape)}")
        values = self._borrow_values()
        device = find_device(vector)
        # Variables that no function has moved to the device may still hold NumPy arrays, such as vels2 of Theano-MPI's
        # classes.  In host memory they would be copied to the device at each call.
        moves = device.must_move_shared_values and all(isinstance(value, np.ndarray) for value in values)
        if device is not NUMPY and (moves or device is _find_common_device(values)):
            for shared, piece in zip(self.shareds, device.unpack(vector, self.shapes, self._dtypes), strict=True):
                get_library(shared).store_value(shared, piece)
            return
        vector = device.to_numpy(vector)
        for shared, value, (start, stop), shape in zip(self.shareds, values, self._bounds, self.shapes, strict=True):
            library, device = get_library(shared), get_array_device(value)
            piece = vector[start:stop].reshape(shape)
            if device is NUMPY and library.is_array(shared):
                array = NUMPY.as_writable(value, has_other_references=False)
                array[...] = piece
                if array is not value:
                    library.store_value(shared, array)
            else:
                library.store_value(shared, device.from_numpy(piece.astype(value.dtype)))

    def get_writable_views(self) -> list[np.ndarray] | None:
        """Return flat, writable views of the variables' memory, or None if one has another dtype or no such memory."""
        views = []
        for value, dtype in zip(self._borrow_values(), self._dtypes, strict=True):
            if not isinstance(value, np.ndarray) or not value.flags.c_contiguous or not value.flags.writeable:
                return None
            if dtype != self.dtype:
                return None
            views.append(value.reshape(-1))
        return views

    def iterate_blocks(self, views: Sequence[np.ndarray]) -> Iterator[tuple[np.ndarray, slice]]:
        """Yield blocks of at most `BLOCK_NBYTES` bytes of a vector in the parts ``views``, and their ranges in it."""
        step = max(1, BLOCK_NBYTES // self.dtype.itemsize)
        offset = 0
        for view in views:
            for start in range(0, view.size, step):
                block = view[start : start + step]
                yield block, slice(offset + start, offset + start + block.size)
            offset += view.size


def concatenate(*vectors: Array) -> Array:
    """Concatenate vectors into an array of a device other than host memory, if one of them is such an array."""
    device = next((device for device in map(find_device, vectors) if device is not NUMPY), NUMPY)
    return device.concatenate([device.as_array(vector) for vector in vectors])


def _find_common_device(values: Sequence[Array]) -> Device:
    """Return the common device of all values if its arrays have arithmetic, else that of host memory."""
    devices = {find_device(value) for value in values}
    device = devices.pop() if len(devices) == 1 else NUMPY
    return device if device.has_arithmetic else NUMPY


class ExchangeState:
    """State of one rank's training, on which a rule operates.

    Parameters
    ----------
    params : list of shared variables
        Variables that ranks exchange: parameters, followed by ``n_averages`` running averages.
    optimizer : list of shared variables
        Variables of the update rule, such as velocities; only floats are used.
    shared : dict of str to LocalRows
        Shared memory of the rule, from `allocate_shared_arrays`.

    Attributes
    ----------
    step, steps_since_exchange : int
        Number of steps of this rank, in all and since the last exchange.
    learning_rate : float
        Learning rate of the last step.
    count_items : callable, optional
        Returns the number of items in this rank's steps since the last exchange: of rows, or of what the loss's weight
        counts, such as words.  None if all ranks have equally many; either all ranks have a function, or none.
    n_average_items : int
        Number of elements of the running averages, at the end of `vector`.
    own : dict
        Arrays and numbers that the rule stores on this rank, and checkpoints save.  The key ``"batches"`` is reserved.
    shared : dict of str to ndarray
        Arrays of `ExchangeRule.get_shared_array_specs`, in shared memory.
    shared_rows : dict of str to LocalRows
        The arrays of ``shared``, as arguments of the methods of `synkhronos.programs.RankContext.lock`.
    """

    def __init__(
        self,
        params: Sequence[SharedVariable],
        optimizer: Sequence[SharedVariable] = (),
        shared: Mapping[str, LocalRows] | None = None,
        n_averages: int = 0,
    ):
        self.params = FlatVariables(params)
        shapes = self.params.shapes[len(self.params.shapes) - n_averages :]
        self.n_average_items = sum(int(np.prod(shape)) for shape in shapes)
        self.optimizer = FlatVariables([s for s in optimizer if np.dtype(s.type.dtype).kind == "f"])
        self.shared_rows = dict(shared or {})
        self.shared = {name: rows.array for name, rows in self.shared_rows.items()}
        self.step = self.steps_since_exchange = 0
        self.learning_rate = 1.0
        self.count_items: Callable[[], float] | None = None
        self.own: dict[str, Any] = {}

    @property
    def vector(self) -> Array:
        """Parameters as one flat vector: a new array of shape ``(n,)``.  Assigning to it sets the parameters."""
        return self.params.get()

    @vector.setter
    def vector(self, value: Array) -> None:
        self.params.set(value)

    def replace_averages(self, vector: Array, averages: Array) -> Array:
        """Return a vector with its running averages replaced by another vector's."""
        if not self.n_average_items:
            return vector
        return concatenate(vector[: -self.n_average_items], averages[-self.n_average_items :])

    def update_with_shared(
        self, name: str, operation: Callable[..., Sequence[Array | None]], row: int | None = None, own_name: str = ""
    ) -> None:
        """Update the parameters together with an array of `shared`, or a row of it, and an array of `own`, if named.

        The operation takes the parameters ``x``, a function that returns the shared array, and the own array.  It
        returns new values of all three, or None for an unchanged one, and may change its arguments in place.  On a
        device the arrays are whole vectors.  In host memory they are blocks, and the operation is called for each
        block.
        """
        shared, rows = self.shared[name], self.shared_rows[name]
        if row is not None:
            shared, rows = shared[row], rows[row : row + 1]
        own = [self.own[own_name]] if own_name else []
        views, vector = self.params.get_writable_views(), None
        if views is None:
            vector = self.vector
            views = [vector] if find_device(vector) is NUMPY else None
        if views is None:
            device = get_array_device(vector)

            def read_shared() -> Array:
                return rows.to_device(device) if row is None else rows.to_device(device)[0]

            vector, new_shared, *own = operation(vector, read_shared, *own)
            if new_shared is not None:
                rows.write(new_shared)
            if own_name and own[0] is not None:
                self.own[own_name] = own[0]
        else:
            for x, bounds in self.params.iterate_blocks(views):
                blocks = x, shared[bounds], *(array[bounds] for array in own)
                results = operation(x, lambda block=blocks[1]: block, *blocks[2:])
                for block, result in zip(blocks, results, strict=True):
                    if result is not None and result is not block:
                        block[...] = result
        if vector is not None:
            self.vector = vector

    @property
    def velocity(self) -> Array:
        """Velocity of the parameters: the optimizer's variables as one flat vector, a new array of shape ``(n,)``.

        The velocity of running averages is 0.  Raise ValueError if the optimizer's variables have another number of
        elements.
        """
        size = self.params.size - self.n_average_items
        if self.optimizer.size != size:
            raise ValueError(
                f"the rule needs the optimizer's velocity: expected {size} elements, as many as the parameters, "
                f"got {self.optimizer.size}"
            )
        velocity = self.optimizer.get()
        n = self.n_average_items
        return concatenate(velocity, np.zeros(n, velocity.dtype)) if n else velocity
