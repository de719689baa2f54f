"""Variables of an update rule: equal on all ranks, or divided among them by `shard_optimizer`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from synkhronos import ranks
from synkhronos.collectives.calls import broadcast, gather, scatter
from synkhronos.graphs.mirror import Mirror
from synkhronos.training.updates.flat_gradient import get_shape
from synkhronos.training.updates.sharded_updates import DividedVariable, get_part_bounds


class OptimizerState:
    """Access to the variables of an update rule as whole arrays.

    Parameters
    ----------
    shareds : list of shared variables
        Variables of the unsharded optimizer.
    parts : dict
        Part of each divided variable, by the variable of the unsharded optimizer.
    size : int or None
        Number of ranks that a sharded optimizer was made for; None if all variables are equal on all ranks.

    Attributes
    ----------
    variables : list of shared variables
        Variables that the ranks update: for a divided variable, the rank's part.
    """

    def __init__(self, shareds: Sequence[Any], parts: Mapping[Any, DividedVariable], size: int | None):
        self._shareds, self._parts, self._size = list(shareds), dict(parts), size
        self.variables = [parts[shared].shared if shared in parts else shared for shared in shareds]
        self._session: ranks.Session | None = None

    def scatter_initial_values(self, is_overwritten: bool = False) -> None:
        """Divide the initial values among the ranks of a new session; does nothing at later calls.

        ``is_overwritten`` tells that the caller is about to set all values.

        Raises
        ------
        RuntimeError
            If the session with the present parts has ended, or has another number of ranks.
        """
        if self._size is None:
            return
        session = ranks.get_session()
        if self._session is session:
            return
        if session.size != self._size:
            raise RuntimeError(
                f"shard_optimizer: the training function was made for {self._size} ranks, got {session.size}"
            )
        if self._session is not None and not is_overwritten:
            raise RuntimeError(
                "shard_optimizer: the ranks that had the parts of the optimizer's state have ended: set all of it by "
                "set_optimizer_state(), resume from a checkpoint, or make a new training function"
            )
        self._session = session
        for part in self._parts.values():
            if part.initial_value.size > 1 and not is_overwritten:
                self._scatter(part, part.initial_value)

    def __getstate__(self) -> dict[str, Any]:
        if self._session is not None:  # copies of the parts would have the master's values on all ranks
            raise TypeError(
                "shard_optimizer: a training function can't be copied or pickled after its first step; make a new one, "
                "and set its state to that of get_optimizer_state()"
            )
        return self.__dict__

    def get(self, shareds: Sequence[Any] | None = None) -> list[np.ndarray]:
        """Return the whole values of variables of the unsharded optimizer; default: of all."""
        self.scatter_initial_values()
        return [
            self._gather(self._parts[shared]) if shared in self._parts else np.array(shared.get_value())
            for shared in (self._shareds if shareds is None else shareds)
        ]

    def set(self, values: Sequence[np.ndarray], shareds: Sequence[Any] | None = None) -> None:
        """Set variables of the unsharded optimizer; default: all.  ``shareds`` has to include all divided variables."""
        self.scatter_initial_values(is_overwritten=True)
        for shared, value in zip(self._shareds if shareds is None else shareds, values, strict=True):
            if shared in self._parts:
                self._scatter(self._parts[shared], value)
            else:
                broadcast(shared, value)

    def get_vector(self, shareds: Sequence[Any]) -> np.ndarray:
        """Return the concatenated values of variables, in the widest of their dtypes."""
        values = self.get(shareds)
        dtype = np.result_type(*(value.dtype for value in values)) if values else np.dtype(np.float32)
        return np.concatenate([np.zeros(0, dtype), *(np.ravel(value).astype(dtype, copy=False) for value in values)])

    def set_vector(self, shareds: Sequence[Any], vector: np.ndarray) -> None:
        """Set variables from a result of `get_vector`.  ``shareds`` has to include all divided variables."""
        shapes = [get_shape(shared) for shared in shareds]
        pieces = np.split(vector, np.cumsum([int(np.prod(shape)) for shape in shapes])[:-1]) if shapes else []
        values = [
            piece.astype(shared.type.dtype).reshape(shape)
            for piece, shared, shape in zip(pieces, shareds, shapes, strict=True)
        ]
        self.set(values, shareds)

    def gather_into(self, shareds: Sequence[Any]) -> None:
        """Set the divided variables among ``shareds`` to their whole values, on each rank that has a copy."""
        for shared in shareds:
            if shared in self._parts:
                value = self._gather(self._parts[shared])
                shared.set_value(value)
                if Mirror.get(ranks.get_session()).get_key(shared) is not None:
                    broadcast(shared, value)

    def _gather(self, part: DividedVariable) -> np.ndarray:
        """Return the whole value of a divided variable."""
        self.scatter_initial_values()
        return join_parts(gather(part.shared, nd_up=1), part.shape)

    def _scatter(self, part: DividedVariable, value: np.ndarray) -> None:
        assert self._size is not None
        flat = value.reshape(-1)
        parts = [flat[start:stop] for start, stop in get_part_bounds(flat.size, self._size)]
        scatter(part.shared, np.concatenate(parts))


def join_parts(parts: Sequence[np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    """Join the ranks' parts of an array; overlapping elements are taken from the first part."""
    array = np.empty(shape, parts[0].dtype)
    flat = array.reshape(-1)
    bounds = get_part_bounds(flat.size, len(parts))
    for part, (start, stop) in zip(reversed(parts), reversed(bounds), strict=True):
        flat[start:stop] = part
    return array
