"""Continuation of training after the death of a worker.

The master keeps a copy of the state of all ranks in memory, made after the last complete operation::

    copy ────> operation ────> copy ────> operation ────> ...
                   │ a worker dies
                   v
               replace the workers, restore the copy on all ranks, and repeat the operation
                   │ a rank fails to start, twice
                   v
               leave the rank out: convert the copy to fewer ranks by `ExchangeRule.resize_states`

An operation is atomic: the copy overwrites all changes of a failed operation, on every rank.  No row is skipped or used
twice.  New workers are forks of the master, which inherit the copy (see `synkhronos.ranks.session`).  Once JAX or CUDA
has started in the master, a fork could not compute.  New workers are then new processes, which receive the copy from
the master, and compile functions again.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from typing import Any, TypeVar

import numpy as np

from synkhronos import ranks
from synkhronos.devices import is_fork_unsafe
from synkhronos.functions import distribute
from synkhronos.programs import RankContext, run
from synkhronos.ranks import WorkerError
from synkhronos.ranks.errors import Death, DeathKind, describe_rank
from synkhronos.training.checkpoints import rank_state
from synkhronos.training.loops.batch_loop import adapt_interval_steps
from synkhronos.training.loops.death_limit import DeathLimit
from synkhronos.training.trainer.trainer_state import TrainerState

_log = logging.getLogger("synkhronos")
T = TypeVar("T")

#: Number of seconds before the second try of a host that could not be reached.
_RETRY_SECONDS = 1.0
#: Approximate number of seconds between two copies, where ranks take their own steps.
_COPY_INTERVAL_SECONDS = 1.0
#: Copies of the states of all ranks, by the trainer's name.  Forked workers inherit them.
_copies_by_trainer: dict[str, list[dict[str, Any]]] = {}


class DeathPolicy:
    """Policy for deaths of workers while operations of a trainer run.  ``on_death="stop"``: a death ends training."""

    #: Number of steps per rank between two copies, where ranks take their own steps; None without copies.
    steps_per_copy: int | None = None
    max_steps_per_launch = sys.maxsize

    def __init__(self) -> None:
        #: Deaths since the last report, as in `Report.deaths`.
        self.deaths: list[dict[str, Any]] = []

    def enable_recovery(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager within which training may continue after deaths."""
        return contextlib.nullcontext()

    def refresh_copy(self) -> None:
        """Copy the state again, as the user may have changed it."""

    def run_idempotent(self, operation: Callable[[], T]) -> T:
        """Call an operation that may be repeated: one that leaves the state of ranks as it is, or sets a value."""
        return operation()

    def run_update(self, operation: Callable[[], T], steps: int = 0) -> T:
        """Call an operation that changes the state of ranks, and takes ``steps`` joint steps."""
        return operation()


class RecoveryPolicy(DeathPolicy):
    """Policy for ``on_death="continue"``: copies the state of a trainer, and replaces workers that die.

    With ``ranks_have_own_state``, ranks with equal parameters differ in other state, such as random generators.
    """

    steps_per_copy: int
    max_steps_per_launch = 1  # after a death the whole launch is repeated

    def __init__(self, state: TrainerState, ranks_have_own_state: bool, max_deaths: int):
        super().__init__()
        self._session = ranks.get_session()
        self._state, self._ranks_have_own_state = state, ranks_have_own_state
        self._death_limit = DeathLimit(max_deaths)
        #: Number of steps taken before the present copy: joint steps, or steps of the master.
        self.step = 0
        self.steps_per_copy = 1
        self._values: dict[str, Any] = {}
        self._shared_values: dict[str, np.ndarray] = {}
        #: Variables of the sharded optimizer, gathered from all ranks.
        self._sharded_optimizer: np.ndarray | None = None
        #: Whether a death is recoverable: there is a copy of the state.
        self.has_copy = False
        #: Number of ranks for which the exchange rule's shared arrays were made.
        self._n_ranks = self._session.size

    # -- operations ------------------------------------------------------------------------------------------

    def run_idempotent(self, operation: Callable[[], T]) -> T:
        """Call an operation, and repeat it after a death."""
        while True:
            began = time.perf_counter()
            try:
                return operation()
            except Exception as error:
                self._recover(error, began)

    def run_update(self, operation: Callable[[], T], steps: int = 0) -> T:
        """Call an operation that changes the state of ranks, then copy the state.  Repeat both after a death.

        If the ranks took their own steps, adapt `steps_per_copy` such that the next ones take about a second.
        """
        began, step_before = time.perf_counter(), self.step

        def call() -> T:
            result = operation()
            self._copy_state()
            return result

        result = self.run_idempotent(call)
        if self.step > step_before:  # `_copy_state` counts the steps that ranks take alone
            seconds = time.perf_counter() - began
            self.steps_per_copy = adapt_interval_steps(self.steps_per_copy, seconds, _COPY_INTERVAL_SECONDS)
        self.step += steps
        self._death_limit.reset_counts_since_copy()
        return result

    def refresh_copy(self) -> None:
        if self._session.has_kept_memory:  # the user's code has caught the error of a death
            self._recover(RuntimeError(self._session.close_reason), time.perf_counter())
        spec = self._state.spec
        stored = self._session.rank.get_or_add_object(("persistent dict", spec.name), dict)
        if "state" in stored:
            if rank_state.has_new_params(stored):
                self.has_copy = False  # a death would undo the user's change, so it ends training until the next copy
            self.run_idempotent(lambda: run(rank_state.prepare_steps, spec))
        self.run_idempotent(self._copy_state)

    @contextlib.contextmanager
    def enable_recovery(self) -> Iterator[None]:
        """Return a context manager that keeps the copy, and the memory that new workers need."""
        try:
            with self._session.keep_memory():
                yield
        finally:
            _copies_by_trainer.pop(self._state.spec.name, None)
            self._values, self._shared_values, self._sharded_optimizer, self.has_copy = {}, {}, None, False

    # -- copies ----------------------------------------------------------------------------------------------

    def _copy_state(self) -> None:
        state, spec = self._state, self._state.spec
        optimizer = state.gather_sharded_optimizer_state()
        if spec.is_joint and not self._ranks_have_own_state:
            self._values, self._sharded_optimizer, self.has_copy = spec.variables.read_values(), optimizer, True
            return  # equal on all ranks
        by_rank = run(rank_state.read_state, spec)
        shared = {name: np.array(data.data) for name, data in spec.shared_arrays.items()}
        # No worker takes part in these assignments, so an interrupt cannot separate them.
        _copies_by_trainer[spec.name], self._shared_values = by_rank, shared
        self._sharded_optimizer, self.has_copy = optimizer, True
        if not spec.is_joint:
            self.step = by_rank[self._session.rank.number]["step"]

    def _recover(self, error: Exception, began: float) -> None:
        """Replace the workers and restore the copy.  Raise the error if no worker has died, or too many have."""
        session, deaths = self._session, []
        ranks_to_remove: Sequence[int] = ()
        while session.has_kept_memory and self.has_copy:
            death = session.death
            assert death is not None
            peer = describe_rank(death.rank, death.host)
            if excess := self._death_limit.record_death(death.rank, death.is_failed_start):
                description = f"{peer} {death.exit_description}"
                raise WorkerError(f"{description}; {excess}", death.rank, description=description) from error
            deaths.append(death)
            ranks_to_remove, size = self._choose_ranks_to_remove(death, ranks_to_remove, error), session.size
            if death.lost_ranks and not ranks_to_remove:  # a host that could not be reached
                time.sleep(_RETRY_SECONDS)
            try:
                self._restore(ranks_to_remove)
            except Exception as failure:
                if session.death is death:
                    raise  # not a death: it would be raised again
                error = failure
                if session.size < size:  # the ranks are removed, and `death` has new numbers
                    ranks_to_remove = ()
                continue
            seconds = time.perf_counter() - began
            lost = {"step": self.step, "seconds": round(seconds, 3)}
            self.deaths += [
                {"rank": death.rank, "host": death.host, "cause": death.exit_description, **lost} for death in deaths
            ]
            _log.warning(
                "%s %s; training continued from step %d, %.1f s later", peer, death.exit_description, self.step, seconds
            )
            return
        raise error

    def _choose_ranks_to_remove(self, death: Death, ranks_to_remove: Sequence[int], error: Exception) -> Sequence[int]:
        """Return the ranks whose device or host can't be used any more.  All others start again.

        The result includes ``ranks_to_remove``.  An earlier death chose these ranks, but a host could not be reached,
        so they were not removed.  ``error`` is that of the failed operation.

        Raises
        ------
        WorkerError
            If training cannot continue without these ranks.
        """
        if not self._death_limit.is_rank_unusable and death.kind != DeathKind.LOST_HOST:
            return ranks_to_remove
        peer = describe_rank(death.rank, death.host)
        description = f"on_death='continue': {peer} {death.exit_description}"
        ranks_to_remove = sorted({*ranks_to_remove, *(death.lost_ranks or (death.rank,))})
        if self._session.rank.master_rank in ranks_to_remove:
            message = f"{description}; the master can't be left out"
            raise WorkerError(message, death.rank, description=description) from error
        _log.warning("%s %s; training continues without ranks %s", peer, death.exit_description, ranks_to_remove)
        self._death_limit.reset_counts_since_copy()
        return ranks_to_remove

    def _restore(self, ranks_to_remove: Sequence[int]) -> None:
        """Start new workers for all ranks but ``ranks_to_remove``, and restore the copy."""
        state, spec = self._state, self._state.spec
        if spec.is_joint and not self._ranks_have_own_state:
            spec.variables.write_values(self._values)
            self._session.replace_workers(is_fork_unsafe(), ranks_to_remove)
            state.set_sharded_optimizer_state(self._sharded_optimizer)
            return
        size, by_rank = self._session.size - len(ranks_to_remove), _copies_by_trainer[spec.name]
        if not spec.is_joint and len(by_rank) != size:
            saved = [{**own, "shared": self._shared_values} for own in by_rank]
            _copies_by_trainer[spec.name] = rank_state.resize_states(saved, spec, size)
        has_new_processes = self._session.replace_workers(is_fork_unsafe(), ranks_to_remove)
        if has_new_processes:
            distribute()  # moves the variables of functions to the device, which a program does not do
        if self._n_ranks != size:
            state.allocate_shared_arrays()
            self._n_ranks = size
        for name, data in spec.shared_arrays.items():
            before = self._shared_values[name]
            data[...] = before if before.shape == data.shape else 0  # as in `restore_state` for another number of ranks
        run(restore_copy, spec, _copies_by_trainer[spec.name] if has_new_processes else None)
        state.set_sharded_optimizer_state(self._sharded_optimizer)
        if not spec.is_joint and all(own["own"] is not None for own in _copies_by_trainer[spec.name]):
            run(rank_state.set_params_to_consensus, spec.name, spec.exchange_rule)


def restore_copy(
    context: RankContext,
    spec: rank_state.RankStateSpec,
    copy_from_master: list[dict[str, Any]] | None,
) -> None:
    """Restore this rank from a copy: the one that the master sent, or else the one in this process's memory."""
    by_rank = _copies_by_trainer[spec.name] if copy_from_master is None else copy_from_master
    own = by_rank[context.number]
    # The values are copied, since the master restores them again if a worker dies before its next copy.
    rank_state.write_state(context, spec, deepcopy({**by_rank[0], **own} if spec.is_joint else own))
    if not context.is_master and copy_from_master is None:
        del _copies_by_trainer[spec.name]  # only the master makes the next copy: here it would not free this memory
