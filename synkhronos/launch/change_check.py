"""Detection of runs that train nothing: parameters that never change, or ranks that compute equal steps.

Neither mistake of a class raises an error by itself: the run goes on for days, and wastes all of it or all ranks but
one.  So digests of variables are compared in the first steps::

    step 1, 2, 3       digests of what the step computes  --> ranks compare them: all must differ
    step 50, or        digest of all parameters           --> compared with the digest before the first step
    end of an epoch
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from synkhronos.devices import get_array_device
from synkhronos.rules.state import Vector
from synkhronos.tasks import Worker

#: Number of steps after which a parameter must have changed.
_MAX_UNCHANGED_STEPS = 50
#: Number of first steps that ranks compare.
_COMPARED_STEPS = 3
SAME_STEPS = (
    "ranks {} and {} have taken the same steps: they train on the same rows in the same order; the class has to choose "
    "its rows by config['rank'] and config['size']"
)


class TrainingError(RuntimeError):
    """A run trains nothing: no parameter changes, or ranks compute equal steps."""


class ChangeCheck:
    """Checks of a rank's first steps.

    Parameters
    ----------
    params : list of shared variables
        All parameters of the class.
    own : list of shared variables
        Variables that a step computes from this rank's rows before the exchange: the parameters, or the gradients.
    """

    def __init__(self, params: list[Any], own: list[Any]):
        self._params, self._own = Vector(params), Vector(own)
        self._start, self._before = digest(self._params), digest(self._own)
        self._steps: list[str] = []
        self._n_steps = 0
        self._has_changed = self._is_compared = False

    def step(self) -> None:
        """Record a step of this rank; to be called before the exchange, which makes ranks equal."""
        self._n_steps += 1
        if len(self._steps) < _COMPARED_STEPS:
            self._steps.append(digest(self._own))

    @property
    def is_due(self) -> bool:
        """Whether ranks that step together should compare their steps now."""
        return not self._is_compared and len(self._steps) == _COMPARED_STEPS

    def check_change(self, learning_rate: float, epoch_ended: bool) -> None:
        """Raise TrainingError if no parameter has changed since before the first step.

        The check takes 50 steps, or 2 if the epoch has ended.  At a learning rate of 0 nothing is checked.
        """
        if self._has_changed or self._n_steps < (2 if epoch_ended else _MAX_UNCHANGED_STEPS) or learning_rate == 0:
            return
        self._has_changed = digest(self._params) != self._start
        if not self._has_changed:
            raise TrainingError(
                f"no parameter has changed in {self._n_steps} steps: this run trains nothing. Does train_iter() call "
                "the functions that compile_iter_fns() has compiled, and are updates of params among theirs?"
            )

    def compare(self, worker: Worker) -> None:
        """Raise TrainingError if two ranks have computed equal first steps; a collective of all ranks, once in a run.

        Ranks that have taken no step, or whose steps have changed nothing, are not compared.
        """
        if self._is_compared:
            return
        self._is_compared = True
        has_stepped = bool(self._steps) and self._steps[-1] != self._before
        if same := find_equal_steps(worker.all_gather(self._steps if has_stepped else None)):
            raise TrainingError(SAME_STEPS.format(*same))


def find_equal_steps(by_rank: Sequence[list[str] | None]) -> tuple[int, int] | None:
    """Return the first two ranks with equal lists of digests, or None; ranks without digests are skipped.

    Examples
    --------
    >>> find_equal_steps([["a", "b"], ["a", "c"], ["a", "b"]])
    (0, 2)
    """
    first: dict[tuple[str, ...], int] = {}
    for rank, steps in enumerate(by_rank):
        if steps and (other := first.setdefault(tuple(steps), rank)) != rank:
            return other, rank
    return None


def digest(vector: Vector) -> str:
    """Return a hash of the values of all variables."""
    value = vector.get()
    array = np.ascontiguousarray(get_array_device(value).to_host(value))
    return hashlib.blake2b(array.view(np.uint8).data, digest_size=16).hexdigest()
