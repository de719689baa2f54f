"""The command of a training step with a sharded optimizer; see `synkhronos.training.updates.shards`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

import synkhronos as synk
from synkhronos import ranks
from synkhronos.collectives.commands import VariableCopy, gather_layouts
from synkhronos.devices import get_array_device
from synkhronos.function.call import Call
from synkhronos.graphs import library_of
from synkhronos.graphs.mirror import get_object
from synkhronos.ranks import Command, Rank
from synkhronos.training.updates.flat_gradient import shape_of
from synkhronos.training.updates.shards import StatePart, get_bounds


class _ShardedStepFields(NamedTuple):
    """Fields of `ShardedStep`; a named tuple cannot have a second base class."""

    gradient: Call
    local_update: Call
    whole_update: Call
    keys: tuple[Any, ...]
    gathers_gradient: bool


class ShardedStep(_ShardedStepFields, Command):
    """Take a training step on all ranks; each rank updates its part of the parameters.

    Attributes
    ----------
    gradient : Call
        Call of the function that writes the gradients of all ranks' parts into a matrix.
    local_update : Call
        Call of the function that replaces the gradient in this rank's row by new parameters.
    whole_update : Call
        Call of the function that sets the parameters to those in the matrix.
    keys : tuple
        Keys of the matrix, of this rank's row of it, and of this rank's number.
    gathers_gradient : bool
        Whether ``local_update`` reads the reduced gradient of all rows from the matrix.
    """

    __slots__ = ()

    @property
    def effect(self) -> str | None:
        """Effect of the command in an error's message."""
        return "The step was taken"

    @property
    def partial_effect(self) -> str | None:
        """Effect in the message of an error after the update of some rank's part."""
        return (
            "Some ranks may have updated their parts of the parameters or of the optimizer's state, and others not: "
            "broadcast() and set_optimizer_state() make them consistent again."
        )

    def run(self, rank: Rank) -> Any:
        """Take the step on this rank; return the outputs of the gradient's function."""
        gradient, local, whole = (call.bind(rank) for call in (self.gradient, self.local_update, self.whole_update))
        self._set_number(rank)
        with rank.suspend_commits():
            loss = self.gradient.execute(rank, gradient)
            self._reduce_scatter(rank)
            if self.gathers_gradient:
                self._all_gather(rank)
        self.local_update.execute(rank, local)
        self._all_gather(rank)
        self.whole_update.execute(rank, whole)
        return loss

    def _set_number(self, rank: Rank) -> None:
        """Set the variable of the rank's number at the first step on these ranks."""
        numbered, key = rank.registry.get(_Numbered), self.keys[2]
        if key in numbered:
            return
        shared = get_object(rank, key)
        library = library_of(shared)
        library.put(shared, get_array_device(library.get(shared)).from_host(np.asarray(rank.number)))
        numbered.add(key)

    def _copies(self, rank: Rank) -> tuple[VariableCopy, VariableCopy]:
        """Return this rank's copies of the matrix and of the row; a collective operation."""
        matrix, row = gather_layouts(rank, self.keys[:2], nccl=True)
        for copy in (matrix, row):
            copy.check_equal_shapes("shard_optimizer")
        if matrix.device is not row.device:
            matrix.refuse("shard_optimizer: the gradient and its reduction are on different devices")
        return matrix, row

    def _reduce_scatter(self, rank: Rank) -> None:
        """Reduce the matrix of all ranks, and set this rank's row."""
        matrix, row = self._copies(rank)
        width = matrix.layouts[0][0][1]
        out = row.get_writable()
        bounds = [r * width for r in range(rank.size + 1)]
        matrix.communicator.reduce_scatter(matrix.get_contiguous(), "avg", bounds, out)
        row.store(out)

    def _all_gather(self, rank: Rank) -> None:
        """Set the matrix on every rank to all ranks' rows."""
        matrix, row = self._copies(rank)
        whole = matrix.get_writable()
        out = [matrix.transport.slice_items(whole, r * shape[0], shape) for r, (shape, _) in enumerate(row.layouts)]
        matrix.communicator.gather(row.get_contiguous(), None, row.layouts, out)
        matrix.store(whole)


class _Numbered(set[Any]):
    """Keys of variables that hold the number of this rank."""


class ShardedState:
    """The optimizer's state in parts on the ranks: how it is gathered, and how it is divided again.

    Parameters
    ----------
    state : list of StatePart or shared variable
        Divided variables, and those that are equal on all ranks.
    size : int
        Number of ranks.
    """

    def __init__(self, state: Sequence[Any], size: int):
        self.state, self.size = list(state), size
        self._session: ranks.Session | None = None

    def begin(self, is_overwritten: bool = False) -> None:
        """Divide the initial state at the first step.

        Parameters
        ----------
        is_overwritten : bool
            Whether all of the state is about to be set.

        Raises
        ------
        RuntimeError
            If the ranks that had the parts have ended, or there are more or fewer than the function was made for.
        """
        session = ranks.session()
        if self._session is session:
            return
        if session.size != self.size:
            raise RuntimeError(
                f"shard_optimizer: the training function was made for {self.size} ranks, got {session.size}"
            )
        if self._session is not None and not is_overwritten:
            raise RuntimeError(
                "shard_optimizer: the ranks that had the parts of the optimizer's state have ended: set all of it by "
                "set_optimizer_state(), resume from a checkpoint, or make a new training function"
            )
        self._session = session
        for variable in self.state:
            if isinstance(variable, StatePart) and variable.first.size > 1 and not is_overwritten:
                self._divide(variable, variable.first)

    def get(self) -> list[np.ndarray]:
        """Return the whole state, in the order of the unsharded optimizer."""
        self.begin()
        return [
            self.gather(variable) if isinstance(variable, StatePart) else np.array(variable.get_value())
            for variable in self.state
        ]

    def set(self, values: Sequence[np.ndarray]) -> None:
        """Set the state from whole arrays, which the caller has checked."""
        self.begin(is_overwritten=True)
        for variable, value in zip(self.state, values, strict=True):
            if isinstance(variable, StatePart):
                self._divide(variable, value)
            else:
                synk.broadcast(variable, value)

    def find(self, whole: Any) -> StatePart | None:
        """Return the parts of a variable of the unsharded optimizer; None if it is not divided."""
        return next((part for part in self.state if isinstance(part, StatePart) and part.whole is whole), None)

    def get_vector(self, variables: Sequence[Any]) -> np.ndarray:
        """Concatenate the values of some variables of the unsharded optimizer, in the widest dtype."""
        self.begin()
        parts = [self.find(variable) for variable in variables]
        values = [
            variable.get_value() if part is None else self.gather(part)
            for variable, part in zip(variables, parts, strict=True)
        ]
        dtype = np.result_type(*(value.dtype for value in values)) if values else np.dtype(np.float32)
        return np.concatenate([np.zeros(0, dtype), *(np.ravel(value).astype(dtype, copy=False) for value in values)])

    def set_vector(self, variables: Sequence[Any], vector: np.ndarray) -> None:
        """Set the variables to values as from `get_vector`; they include all divided ones."""
        self.begin(is_overwritten=True)
        start = 0
        for variable in variables:
            part, shape = self.find(variable), shape_of(variable)
            size = int(np.prod(shape))
            value = vector[start : start + size].astype(variable.type.dtype).reshape(shape)
            start += size
            if part is None:
                synk.broadcast(variable, value)
            else:
                self._divide(part, value)

    def gather(self, part: StatePart) -> np.ndarray:
        """Return the whole of a divided variable."""
        self.begin()
        return join_parts(synk.gather(part.shared, nd_up=1), part.shape)

    def _divide(self, part: StatePart, value: np.ndarray) -> None:
        flat = value.reshape(-1)
        parts = [flat[start:stop] for start, stop in get_bounds(flat.size, self.size)]
        synk.scatter(part.shared, np.concatenate(parts))


def join_parts(parts: Sequence[np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    """Join the ranks' parts of an array; where parts overlap, the elements are those of the first part."""
    whole = np.empty(shape, parts[0].dtype)
    flat = whole.reshape(-1)
    bounds = get_bounds(flat.size, len(parts))
    for part, (start, stop) in zip(reversed(parts), reversed(bounds), strict=True):
        flat[start:stop] = part
    return whole
