"""Variables of an update rule: equal on all ranks, or sharded by `shard_optimizer`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from synkhronos import ranks
from synkhronos.collectives.api import broadcast, gather, scatter
from synkhronos.replication.replicator import Replicator
from synkhronos.training.updates.shard_layout import get_shard_bounds
from synkhronos.training.updates.sharded_updates import ShardedVariable
from synkhronos.training.updates.shared_variables import get_shape
from synkhronos.variable_types import SharedVariable


class OptimizerState:
    """Access to the variables of an update rule as whole arrays.

    ``whole_variables`` are the variables of the unsharded optimizer, and keys of ``sharded_variables``.  ``n_ranks`` is
    the number of ranks that have shards; None if all variables are equal on all ranks.  ``variables`` are the variables
    that ranks update.  For a sharded variable this is the rank's shard.
    """

    def __init__(
        self,
        whole_variables: Sequence[SharedVariable],
        sharded_variables: Mapping[Any, ShardedVariable],
        n_ranks: int | None,
    ):
        self._whole_variables, self._sharded_variables = list(whole_variables), dict(sharded_variables)
        self.n_ranks = n_ranks
        self.variables = [
            sharded_variables[shared].shard if shared in sharded_variables else shared for shared in whole_variables
        ]
        self._session: ranks.Session | None = None

    @property
    def is_sharded(self) -> bool:
        """Whether a rank has a shard of some variables."""
        return self.n_ranks is not None

    def ensure_scattered(self) -> None:
        """Scatter the shards of the initial values to the ranks of a new session, unless they have been scattered.

        Raise RuntimeError if the session with the present shards has ended.
        """
        if not self.is_sharded or self._session is ranks.get_session():
            return
        session = self._get_session()
        if self._session is not None:
            raise RuntimeError(
                "shard_optimizer: the ranks that had the parts of the optimizer's state have ended: set all of it by "
                "set_optimizer_state(), resume from a checkpoint, or make a new training function"
            )
        for variable in self._sharded_variables.values():
            if variable.initial_value.size > 1:
                self._scatter(variable, variable.initial_value)
        self._session = session  # last: after an interrupt, the next step starts again

    def _get_session(self) -> ranks.Session:
        """Return the session.  Raise RuntimeError if its number of ranks is not that of the shards."""
        session = ranks.get_session()
        if session.size != self.n_ranks:
            raise RuntimeError(
                f"shard_optimizer: the training function was made for {self.n_ranks} ranks, got {session.size}"
            )
        return session

    def __getstate__(self) -> dict[str, Any]:
        if self._session is not None:  # copies of the shards would have the master's values on all ranks
            raise TypeError(
                "shard_optimizer: a training function can't be copied or pickled after its first step; make a new one, "
                "and set its state to that of get_optimizer_state()"
            )
        return self.__dict__

    def gather_values(self, whole_variables: Sequence[SharedVariable] | None = None) -> list[np.ndarray]:
        """Return the whole values of variables of the unsharded optimizer, by default of all."""
        self.ensure_scattered()
        return [
            self._gather(self._sharded_variables[shared])
            if shared in self._sharded_variables
            else np.array(shared.get_value())
            for shared in (self._whole_variables if whole_variables is None else whole_variables)
        ]

    def set_values(self, values: Sequence[np.ndarray], whole_variables: Sequence[SharedVariable] | None = None) -> None:
        """Set variables of the unsharded optimizer on all ranks, by default all.

        ValueError is raised if a sharded variable is missing, as its shards would keep the values of another session.
        """
        whole_variables = self._whole_variables if whole_variables is None else whole_variables
        missing = [shared.name for shared in self._sharded_variables if shared not in set(whole_variables)]
        if missing:
            raise ValueError(f"whole_variables: expected all sharded variables; missing: {missing}")
        session = self._get_session() if self.is_sharded else None
        for shared, value in zip(whole_variables, values, strict=True):
            if shared in self._sharded_variables:
                self._scatter(self._sharded_variables[shared], value)
            else:
                broadcast(shared, value)
        self._session = session  # last: after an interrupt, the next step scatters other values, or raises an error

    def gather_vector(self, whole_variables: Sequence[SharedVariable]) -> np.ndarray:
        """Return the concatenated values of variables, in the widest of their dtypes."""
        values = self.gather_values(whole_variables)
        dtype = np.result_type(*(value.dtype for value in values)) if values else np.dtype(np.float32)
        return np.concatenate([np.zeros(0, dtype), *(np.ravel(value).astype(dtype, copy=False) for value in values)])

    def set_vector(self, whole_variables: Sequence[SharedVariable], vector: np.ndarray) -> None:
        """Set variables from a result of `gather_vector`, as `set_values` does."""
        shapes = [get_shape(shared) for shared in whole_variables]
        pieces = np.split(vector, np.cumsum([int(np.prod(shape)) for shape in shapes])[:-1]) if shapes else []
        values = [
            piece.astype(shared.type.dtype).reshape(shape)
            for piece, shared, shape in zip(pieces, whole_variables, shapes, strict=True)
        ]
        self.set_values(values, whole_variables)

    def gather_into_whole_variables(self, whole_variables: Sequence[SharedVariable]) -> None:
        """Set the sharded variables to their whole values, on each rank with a copy.  The shards remain."""
        for shared in whole_variables:
            if shared in self._sharded_variables:
                value = self._gather(self._sharded_variables[shared])
                shared.set_value(value)
                if Replicator.get_or_create(ranks.get_session()).get_key(shared) is not None:
                    broadcast(shared, value)

    def _gather(self, variable: ShardedVariable) -> np.ndarray:
        """Return the whole value of a sharded variable."""
        self.ensure_scattered()
        return join_shards(gather(variable.shard, nd_up=1), variable.shape)

    def _scatter(self, variable: ShardedVariable, value: np.ndarray) -> None:
        assert self.n_ranks is not None
        flat = value.reshape(-1)
        shards = [flat[start:stop] for start, stop in get_shard_bounds(flat.size, self.n_ranks)]
        scatter(variable.shard, np.concatenate(shards))


def join_shards(shards: Sequence[np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    """Join the ranks' shards of an array.  Overlapping elements are taken from the first shard."""
    array = np.empty(shape, shards[0].dtype)
    flat = array.reshape(-1)
    bounds = get_shard_bounds(flat.size, len(shards))
    for shard, (start, stop) in zip(reversed(shards), reversed(bounds), strict=True):
        flat[start:stop] = shard
    return array
