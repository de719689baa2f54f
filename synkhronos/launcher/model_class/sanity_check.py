"""Detection of runs that train nothing: parameters that never change, or ranks that compute equal steps.

Neither mistake of a model class raises an error by itself.  If no parameter changes, the run wastes the time of all
ranks.  If ranks compute equal steps, it wastes the time of all but one.  To detect both, hashes of variables are
compared in the first steps::

    steps 1, 2, 3      hash of the step's results, cost --> must differ between ranks
    step 50, or        hash of all parameters           --> must differ from the hash before the first step
    end of an epoch
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from synkhronos.exchange_rules.state import FlatVariables
from synkhronos.programs import RankContext
from synkhronos.variable_types import SharedVariable

#: Number of steps after which a parameter must have changed.
_MAX_UNCHANGED_STEPS = 50
#: Number of first steps whose hashes ranks compare.
_N_COMPARED_STEPS = 3
EQUAL_STEPS_MESSAGE = (
    "ranks {} and {} have taken equal steps of equal costs, as from the same rows in the same order; the class has to "
    "choose its rows by config['rank'] and config['size']"
)


class IneffectiveTrainingError(RuntimeError):
    """A run trains nothing: no parameter changes, or two ranks compute equal steps."""


class SanityCheck:
    """Checks a rank's first steps: the steps must change parameters, and differ from other ranks' steps.

    ``params`` are variables of which a step must change one: parameters, and scales of the loss, which a skipped step
    lowers.  ``step_variables`` are the variables that a step computes from this rank's rows, before the exchange:
    parameters or gradients.
    """

    def __init__(self, params: list[SharedVariable], step_variables: list[Any]):
        self._params, self._step_values = FlatVariables(params), FlatVariables(step_variables)
        self._initial_params_hash, self._initial_step_hash = hash_values(self._params), hash_values(self._step_values)
        self._step_hashes: list[str] = []
        self._n_steps = 0
        self._has_changed = self._is_compared = False

    def record_step(self, get_cost: Callable[[], float]) -> bool:
        """Record a step before the exchange makes ranks equal.  Return True if ranks should be compared now."""
        self._n_steps += 1
        if len(self._step_hashes) < _N_COMPARED_STEPS:
            self._step_hashes.append(hash_step(self._step_values, get_cost()))
        return not self._is_compared and len(self._step_hashes) == _N_COMPARED_STEPS

    def check_params_change(self, learning_rate: float, has_epoch_ended: bool) -> None:
        """Raise IneffectiveTrainingError if no parameter has changed although the learning rate is not 0.

        Nothing is checked before step 50, or step 2 if the epoch has ended.
        """
        if self._has_changed or self._n_steps < (2 if has_epoch_ended else _MAX_UNCHANGED_STEPS) or learning_rate == 0:
            return
        self._has_changed = hash_values(self._params) != self._initial_params_hash
        if not self._has_changed:
            raise IneffectiveTrainingError(
                f"no parameter has changed in {self._n_steps} steps: this run trains nothing. Does train_iter() call "
                "the functions that compile_iter_fns() has compiled, and are updates of params among theirs?"
            )

    def compare_ranks(self, context: RankContext) -> None:
        """Raise IneffectiveTrainingError, at the first call, if two ranks have taken equal steps.  A collective."""
        if self._is_compared:
            return
        self._is_compared = True
        has_stepped = hash_values(self._step_values) != self._initial_step_hash
        if equal_ranks := find_ranks_with_equal_steps(context.all_gather(self._step_hashes if has_stepped else None)):
            raise IneffectiveTrainingError(EQUAL_STEPS_MESSAGE.format(*equal_ranks))


def find_ranks_with_equal_steps(step_hashes_by_rank: Sequence[list[str] | None]) -> tuple[int, int] | None:
    """Return the first two ranks with equal lists of hashes, or None if there are none.

    Ranks without hashes are skipped.  Ranks with an empty hash are skipped too, since NaN makes all ranks equal.

    Examples
    --------
    >>> find_ranks_with_equal_steps([["a", "b"], ["a", "c"], ["a", "b"]])
    (0, 2)
    """
    first_rank: dict[tuple[str, ...], int] = {}
    for rank, steps in enumerate(step_hashes_by_rank):
        if steps and all(steps) and (other := first_rank.setdefault(tuple(steps), rank)) != rank:
            return other, rank
    return None


def hash_step(step_values: FlatVariables, cost: float) -> str:
    """Return a hash of the values that a step has computed, and its cost, or "" if some values are NaN or infinite.

    Without the cost, steps from other rows may be equal, as those of a rule that takes signs.
    """
    return f"{hash_values(step_values)} {cost}" if np.isfinite(step_values.to_numpy()).all() else ""


def hash_values(vector: FlatVariables) -> str:
    """Return a hash of the vector's elements."""
    return hashlib.blake2b(np.ascontiguousarray(vector.to_numpy()).view(np.uint8).data, digest_size=16).hexdigest()
