"""What one rank trains, as rules see it.

`State`
    The rank's parameters, its optimizer's variables, and what the rule remembers.
`Vector`
    Shared variables as one vector.
`concatenate`
    Vectors as one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from synkhronos.devices import HOST, JAX, device_of
from synkhronos.graphs import library_of
from synkhronos.tasks import LocalRows

#: Bytes of a block in which vectors are worked on in host memory: it stays in the processor's caches.
BLOCK = 1 << 20


class Vector:
    """Shared variables of floats as one vector, in their order, of the widest of their dtypes.

    It is where the variables are: a NumPy array, or a JAX array where they are JAX's.  GpuArrays come as NumPy arrays.
    """

    def __init__(self, shareds: Sequence[Any]):
        self.shareds = list(shareds)
        values = self._values()
        self.shapes = [tuple(int(length) for length in value.shape) for value in values]
        self._dtypes = [np.dtype(shared.type.dtype) for shared in self.shareds]
        self.dtype = np.result_type(*self._dtypes) if self._dtypes else np.dtype(np.float32)
        ends = np.cumsum([0, *(int(np.prod(shape)) for shape in self.shapes)])
        self._bounds = list(zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True))
        self.size = int(ends[-1])

    def _values(self) -> list[Any]:
        return [library_of(shared).get(shared) for shared in self.shareds]

    @property
    def is_jax(self) -> bool:
        """Whether the vector is a JAX array."""
        return _are_jax(self._values())

    def get(self) -> Any:
        """Return the vector: a new array."""
        values = self._values()
        if _are_jax(values):
            return self._traced[0](values)
        flat = [np.ravel(device_of(value).to_host(value)) for value in values]
        # A copy even of one: the variable's own memory changes with its next update.
        return np.concatenate(flat).astype(self.dtype, copy=False) if flat else np.zeros(0, self.dtype)

    def set(self, vector: Any) -> None:
        """Give the variables the vector's values."""
        if tuple(vector.shape) != (self.size,):
            raise ValueError(f"expected a vector of {self.size} elements, got shape {tuple(vector.shape)}")
        values = self._values()
        if JAX.holds(vector) and _are_jax(values):
            pieces = self._traced[1](vector)
            for shared, piece in zip(self.shareds, pieces, strict=True):
                library_of(shared).put(shared, piece)
            return
        vector = np.asarray(vector)
        for shared, value, (start, stop), shape in zip(self.shareds, values, self._bounds, self.shapes, strict=True):
            library, device = library_of(shared), device_of(value)
            piece = vector[start:stop].reshape(shape)
            if device is HOST and library.is_array(shared):
                array = HOST.writable(value, is_referenced=False)
                array[...] = piece
                if array is not value:
                    library.put(shared, array)
            else:
                library.put(shared, device.from_host(piece.astype(value.dtype)))

    def pieces(self) -> list[np.ndarray] | None:
        """Return the variables' own memory as runs of the vector, to be written in place; None where that can't be."""
        pieces = []
        for value, dtype in zip(self._values(), self._dtypes, strict=True):
            if not isinstance(value, np.ndarray) or not value.flags.c_contiguous or not value.flags.writeable:
                return None
            if dtype != self.dtype:
                return None
            pieces.append(value.reshape(-1))
        return pieces

    def blocks(self, pieces: Sequence[np.ndarray]) -> Iterator[tuple[np.ndarray, slice]]:
        """Cut runs of the vector into blocks; each comes with its place in the vector."""
        step = max(1, BLOCK // self.dtype.itemsize)
        at = 0
        for piece in pieces:
            for start in range(0, piece.size, step):
                part = piece[start : start + step]
                yield part, slice(at + start, at + start + part.size)
            at += piece.size

    @cached_property
    def _traced(self) -> tuple[Any, Any]:
        import jax
        import jax.numpy as jnp

        def joined(values: list[Any]) -> Any:
            return jnp.concatenate([value.reshape(-1).astype(self.dtype) for value in values])

        def cut(vector: Any) -> list[Any]:
            return [
                vector[start:stop].reshape(shape).astype(dtype)
                for (start, stop), shape, dtype in zip(self._bounds, self.shapes, self._dtypes, strict=True)
            ]

        return jax.jit(joined), jax.jit(cut)


def concatenate(*vectors: Any) -> Any:
    """Return vectors as one: a JAX array if any of them is one, else a NumPy array."""
    if any(map(JAX.holds, vectors)):
        import jax.numpy as jnp

        return jnp.concatenate(vectors)
    return np.concatenate(vectors)


def _are_jax(values: Sequence[Any]) -> bool:
    return bool(values) and all(JAX.holds(value) for value in values)


class State:
    """What one rank trains.

    Parameters
    ----------
    params : list of shared variables
        Those that the rule exchanges.
    optimizer : list of shared variables
        What the update rule remembers of them.
    shared : dict of str to LocalRows
        Memory that all ranks see, as `Rule.memory` asks for it.
    n_averages : int
        How many of `params`, at the end of the list, are running averages: variables that ranks exchange, but no
        optimizer trains.

    Attributes
    ----------
    step : int
        The steps that this rank has taken.
    since : int
        Those that it has taken since the last exchange.
    learning_rate : float
        That of the last step.
    count_items : callable, optional
        Returns the number of items (such as words) in this rank's steps since the last exchange, for models whose loss
        has such a weight; None where losses are means over rows.
    averages : int
        The number of elements of running averages at the end of `vector`.
    own : dict
        What the rule remembers on this rank: arrays and numbers, which are kept in checkpoints.
    shared : dict of str to ndarray
        What all ranks see.
    """

    def __init__(
        self,
        params: Sequence[Any],
        optimizer: Sequence[Any] = (),
        shared: Mapping[str, LocalRows] | None = None,
        n_averages: int = 0,
    ):
        self.params = Vector(params)
        shapes = self.params.shapes[len(self.params.shapes) - n_averages :]
        self.averages = sum(int(np.prod(shape)) for shape in shapes)
        self.optimizer = Vector([s for s in optimizer if np.dtype(s.type.dtype).kind == "f"])
        self.rows = dict(shared or {})
        self.shared = {name: rows.array for name, rows in self.rows.items()}
        self.step = self.since = 0
        self.learning_rate = 1.0
        self.count_items: Callable[[], float] | None = None
        self.own: dict[str, Any] = {}
        self._scratch: dict[str, np.ndarray] = {}

    @property
    def vector(self) -> Any:
        """The parameters, one after the other: a new array."""
        return self.params.get()

    @vector.setter
    def vector(self, value: Any) -> None:
        self.params.set(value)

    def with_averages(self, vector: Any, averages: Any) -> Any:
        """Return a vector like `vector` with another one's running averages."""
        if not self.averages:
            return vector
        return concatenate(vector[: -self.averages], averages[-self.averages :])

    def opened(self) -> tuple[list[np.ndarray] | None, Any]:
        """Return the parameters' host memory, to be written in place, and what `vector` has to be set to afterwards.

        Returns
        -------
        runs : list of ndarray, or None
            Runs of the vector; None where the parameters are JAX arrays.
        vector : array, or None
            The runs' memory, or the JAX array; None where the runs are the variables' own memory: nothing is to be set.
        """
        runs = self.params.pieces()
        if runs is not None:
            return runs, None
        vector = self.vector
        return None if JAX.holds(vector) else [vector], vector

    @property
    def velocity(self) -> Any:
        """What the update rule remembers of the parameters if it is one vector as long as theirs; a new array.

        Running averages have the velocity 0.
        """
        size = self.params.size - self.averages
        if self.optimizer.size != size:
            raise ValueError(
                "the rule needs the optimizer's velocity: expected as many elements as the parameters' "
                f"{size}, got {self.optimizer.size}"
            )
        velocity = self.optimizer.get()
        return concatenate(velocity, np.zeros(self.averages, velocity.dtype)) if self.averages else velocity

    def scratch(self, name: str, size: int) -> np.ndarray:
        """Return memory that is kept for intermediate results, of at least a size."""
        kept = self._scratch.get(name)
        if kept is None or kept.size < size:
            kept = self._scratch[name] = np.empty(size, self.params.dtype)
        return kept
