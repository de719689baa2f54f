"""Training that goes on after the death of a worker.

The master has a copy of the state of all ranks in memory, of the last whole step or exchange::

    copy() ──> operation() ──> copy() ──> operation() ──> ...
                   │ a worker dies
                   v
               replace the workers, restore the copy on all ranks, and call the operation again
                   │ a worker can't start, twice
                   v
               leave its device out: the copy is converted to fewer ranks, as a checkpoint is

An operation is all or nothing: what a failed one has changed on any rank is replaced by the copy.  So no row is lost or
used twice.  New workers are forks of the master, and inherit the copy with everything else (see
`synkhronos.ranks.session`).  Once JAX or CUDA has started in the master they are new processes instead: a fork could
not compute.  They get the copy with the command that restores it, and compile functions again.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import numpy as np

from synkhronos import ranks
from synkhronos.devices import HOST, Device, is_fork_unsafe
from synkhronos.function import distribute
from synkhronos.ranks import WorkerError
from synkhronos.ranks.errors import Death
from synkhronos.rules.state import Vector
from synkhronos.tasks import Worker, run
from synkhronos.training import rank_state
from synkhronos.training.progress import TrainerState
from synkhronos.training.step_interval import adapt_steps

_log = logging.getLogger("synkhronos")
T = TypeVar("T")

#: Number of deaths without a copy in between after which the training ends: the step itself may be the cause.
MAX_REPEATED = 3
#: Number of recoveries in a row in which a rank fails to start, after which its device is left out.
MAX_FAILED_STARTS = 2
#: Approximate seconds between two copies, where ranks take steps of their own.
_INTERVAL = 1.0
#: States of all ranks, by the trainer's name.  Workers that are forks read what they have inherited.
_states: dict[str, list[dict[str, Any]]] = {}


@dataclass(frozen=True)
class SurvivedDeath:
    """Death of a worker after which a training went on.

    Attributes
    ----------
    rank : int
    host : str
        Name of the rank's machine; "" if there is only one.
    cause : str
        Description of the worker's exit, such as "was killed by SIGKILL".
    step : int
        Number of steps of the copy from which the training went on: those of all ranks together under BSP on gradients,
        else the master's.
    seconds : float
        Seconds lost: from the start of the failed operation until new workers had the state.
    """

    rank: int
    host: str
    cause: str
    step: int
    seconds: float


class DeathHandler:
    """Calls the operations of a training; the death of a worker ends it, as ``on_death="stop"`` asks.

    Attributes
    ----------
    steps_ahead : int or None
        Number of a rank's steps until the next copy, where ranks take steps of their own; None without copies.
    max_repeats : int
        Maximal number of steps in a launch, where all ranks take them together.
    """

    steps_ahead: int | None = None
    max_repeats = sys.maxsize

    def keep_copy(self) -> contextlib.AbstractContextManager[None]:
        """Keep copies within a ``with`` block."""
        return contextlib.nullcontext()

    def copy(self) -> None:
        """Copy the state anew: the user may have changed it."""

    def adapt(self, seconds: float) -> None:
        """Adapt `steps_ahead` to the seconds that these steps took."""

    def run(self, operation: Callable[[], T]) -> T:
        """Call an operation that changes no state of the ranks."""
        return operation()

    def change(self, operation: Callable[[], T], steps: int = 0) -> T:
        """Call an operation that changes the ranks' state.

        Parameters
        ----------
        operation : callable
        steps : int
            Number of steps that it takes, where all ranks take them together.
        """
        return operation()

    def take_deaths(self) -> list[dict[str, Any]]:
        """Return the deaths since the last call, for a report."""
        return []


class Survival(DeathHandler):
    """Copies the state of a trainer, and replaces workers that die: ``on_death="continue"``.

    Parameters
    ----------
    state : TrainerState
    device : Device
        Device of the trainer's functions.
    differs : bool
        Whether ranks with equal parameters have other state that differs: random streams, or updates of their own.
    max_deaths : int
        Number of deaths after which the next one ends the training.
    has_loader : bool
        Whether rows come from a `Loader`.

    Attributes
    ----------
    max_repeats : int
        1: after a death the whole launch is repeated.
    deaths : list of SurvivedDeath
        Deaths since `take_deaths` was last called.
    step : int
        Number of steps of the present copy.
    """

    steps_ahead: int
    max_repeats = 1

    def __init__(self, state: TrainerState, device: Device, differs: bool, max_deaths: int, has_loader: bool):
        self._session = ranks.get_session()
        if not self._session.can_replace_workers:
            raise ValueError(
                "on_death: 'continue' needs ranks on one machine; use 'stop', and resume from a checkpoint, or the "
                "launcher's on_death"
            )
        if has_loader and (device is not HOST or is_fork_unsafe()):
            raise ValueError(
                "on_death: 'continue' needs Data or arrays instead of a Loader where JAX has started: a loader's "
                "processes would keep the memory of the workers that died"
            )
        self._state, self._differs, self._max_deaths = state, differs, max_deaths
        self._n_deaths = self._n_repeated = 0
        #: Number of the last starts of workers that failed, and the rank that failed in them.
        self._n_failed_starts, self._failed_rank = 0, -1
        self.deaths: list[SurvivedDeath] = []
        self.step = 0
        self.steps_ahead = 1
        self._common: dict[str, Any] = {}
        self._shared: dict[str, np.ndarray] = {}
        #: The sharded optimizer's variables, of all ranks together.
        self._optimizer: np.ndarray | None = None
        self._is_begun = self._has_copy = False
        #: Number of ranks for which the exchange rule's memory was made.
        self._n_ranks = self._session.size

    # -- operations ------------------------------------------------------------------------------------------

    def run(self, operation: Callable[[], T]) -> T:
        """Call an operation that changes no state of the ranks; repeat it if a worker dies."""
        while True:
            began = time.perf_counter()
            try:
                return operation()
            except Exception as error:
                self._recover(error, began)

    def change(self, operation: Callable[[], T], steps: int = 0) -> T:
        """Call an operation that changes the ranks' state, and copy it; repeat both if a worker dies."""

        def call() -> T:
            result = operation()
            self._copy()
            return result

        result = self.run(call)
        self.step += steps
        self._n_repeated = 0
        return result

    def copy(self) -> None:
        """Copy the state anew: the user may have changed it."""
        if self._session.has_kept_memory:  # a death of which the user's code has caught the error
            self._recover(RuntimeError(self._session.close_reason), time.perf_counter())
        self.run(self._copy)

    def take_deaths(self) -> list[dict[str, Any]]:
        """Return the deaths since the last call, for a report."""
        deaths, self.deaths = self.deaths, []
        return [asdict(death) for death in deaths]

    def adapt(self, seconds: float) -> None:
        """Adapt `steps_ahead` such that these steps take about a second."""
        self.steps_ahead = adapt_steps(self.steps_ahead, seconds, _INTERVAL)

    @contextlib.contextmanager
    def keep_copy(self) -> Iterator[None]:
        """Keep copies, and the memory that new workers need, within a ``with`` block."""
        try:
            with self._session.keep_memory():
                yield
        finally:
            _states.pop(self._state.training.name, None)
            self._common, self._shared, self._optimizer, self._has_copy = {}, {}, None, False

    # -- copies ----------------------------------------------------------------------------------------------

    def _copy(self) -> None:
        state, training = self._state, self._state.training
        optimizer = state.get_sharded_optimizer()
        if training.is_joint and not self._differs:
            self._common, self._optimizer, self._has_copy = _read_variables(training.groups), optimizer, True
            return  # the same on all ranks
        by_rank = run(rank_state.collect_state, training)
        shared = {name: np.array(data.data) for name, data in training.memory.items()}
        stored = self._session.rank.objects.get(("storage", training.name), {})
        # An interrupt cannot come between the parts of a copy that are assigned here: no worker takes part.
        _states[training.name], self._shared, self._is_begun = by_rank, shared, "state" in stored
        self._optimizer, self._has_copy = optimizer, True
        if not training.is_joint:
            self.step = by_rank[self._session.rank.number]["step"]

    def _recover(self, error: Exception, began: float) -> None:
        """Replace the workers and restore the copy; raise the error if it is no worker's death, or one too many."""
        session, deaths = self._session, []
        while session.has_kept_memory and self._has_copy:
            death = session.death
            assert death is not None
            who = f"rank {death.rank}" + (f" on host {death.host}" if death.host else "")
            self._n_deaths += 1
            self._n_repeated += 1
            if self._n_deaths > self._max_deaths:
                limit = f"max_deaths={self._max_deaths} of them"
            elif self._n_repeated > MAX_REPEATED:
                limit = f"{MAX_REPEATED} of them in the same step"
            else:
                limit = ""
            if limit:
                raise WorkerError(
                    f"{who} {death.cause}; on_death='continue' goes on after {limit}, and this is one more", death.rank
                ) from error
            deaths.append(death)
            broken = self._find_broken(death)
            try:
                self._restore(broken)
            except Exception as failure:
                error = failure
                continue
            seconds = time.perf_counter() - began
            for survived in deaths:
                self.deaths.append(
                    SurvivedDeath(survived.rank, survived.host, survived.cause, self.step, round(seconds, 3))
                )
            _log.warning("%s %s; the training went on from step %d, %.1f s later", who, death.cause, self.step, seconds)
            return
        raise error

    def _find_broken(self, death: Death) -> int | None:
        """Return the rank that has died if its device can't be used any more; None if it may start again.

        Raises
        ------
        WorkerError
            If the training can't go on without this rank.
        """
        is_failed_start = not death.pid
        if not is_failed_start or death.rank != self._failed_rank:
            self._n_failed_starts, self._failed_rank = 0, death.rank
        self._n_failed_starts += is_failed_start
        if self._n_failed_starts < MAX_FAILED_STARTS:
            return None
        failure = f"on_death='continue': rank {death.rank} {death.cause}"
        if death.rank == self._session.rank.root:
            raise WorkerError(f"{failure}; no device is left for the master", death.rank)
        if self._optimizer is not None:
            words = "with shard_optimizer=True the training needs all ranks: resume from a checkpoint"
            raise WorkerError(f"{failure}; {words}", death.rank)
        _log.warning("rank %d %s; its device is left out", death.rank, death.cause)
        self._n_failed_starts = self._n_repeated = 0
        return death.rank

    def _restore(self, without: int | None) -> None:
        """Start new workers, except a rank that is left out, and restore the copy."""
        state, training, is_fresh = self._state, self._state.training, is_fork_unsafe()
        if training.is_joint and not self._differs:
            _write_variables(training.groups, self._common)
            self._session.replace_workers(is_fresh, without)
            state.set_sharded_optimizer(self._optimizer)
            return
        size, by_rank = self._session.size - (without is not None), _states[training.name]
        if not training.is_joint and len(by_rank) != size:
            saved = [{**own, "shared": self._shared} for own in by_rank]
            _states[training.name] = rank_state.resize_states(saved, training, size)
        self._session.replace_workers(is_fresh, without)
        if is_fresh:
            distribute()  # functions move their variables to the device, where a task would leave them on the host
        if self._n_ranks != size:
            state.renew_memory()
            self._n_ranks = size
        for name, data in training.memory.items():
            before = self._shared[name]
            data[...] = before if before.shape == data.shape else 0  # as after a resumption on other ranks
        run(restore_copy, training, self._is_begun, _states[training.name] if is_fresh else None)
        state.set_sharded_optimizer(self._optimizer)
        if not training.is_joint and self._is_begun:
            run(rank_state.set_reported_params, training.name, training.rule)


def _list_vectors(groups: rank_state.Groups) -> list[tuple[str, list[Any]]]:
    """Return the roles whose variables are copied as a vector, with the variables; a sharded optimizer has none."""
    vectors = [("params", groups.params), ("optimizer", groups.optimizer), ("excluded", groups.excluded)]
    return [(role, variables) for role, variables in vectors if variables is not None]


def _read_variables(groups: rank_state.Groups) -> dict[str, Any]:
    """Return copies of the values of the variables that are equal on all ranks."""
    values = {role: np.array(Vector(variables).get()) for role, variables in _list_vectors(groups)}
    return {**values, "others": [np.array(rank_state.get_value(shared)) for shared in groups.others]}


def _write_variables(groups: rank_state.Groups, values: dict[str, Any]) -> None:
    """Set the variables of this process to copies of the values that `_read_variables` returned."""
    for role, variables in _list_vectors(groups):
        Vector(variables).set(np.array(values[role]))
    for shared, value in zip(groups.others, values["others"], strict=True):
        rank_state.put_value(shared, np.array(value))


def restore_copy(
    worker: Worker, training: rank_state.RankTraining, is_begun: bool, sent: list[dict[str, Any]] | None
) -> None:
    """Restore this rank from the copy that was sent, or that it has inherited, or made if it is the master."""
    by_rank = _states[training.name] if sent is None else sent
    own = by_rank[worker.number]
    # Copied: the master restores it again if a worker dies before the next copy.
    rank_state.set_state(worker, training, deepcopy({**by_rank[0], **own} if training.is_joint else own))
    if not is_begun:
        worker.get_storage(training.name).clear()
    if not worker.is_master and sent is None:
        del _states[training.name]  # memory that the next copy would not free here
