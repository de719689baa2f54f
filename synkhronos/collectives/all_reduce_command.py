"""The command of `all_reduce`, with plans for its repetitions, as in a training loop.

An `AllReducePlan` has all that the ranks agree on in the first `all_reduce` of some variables: layouts, communicators,
and the generation of the connection.  In a repetition, each rank checks that its own plan is still valid, and compares
the plan's digest with those of the other ranks.  If the digests differ, all ranks make new plans.

An all-reduce takes one of these paths:

===========  ========================================  ===============================================================
Path         Condition                                 Barriers, and what a rank's failure or an interrupt changes
===========  ========================================  ===============================================================
Speculative  `AllReduce.run`, with a valid plan        One, after the start, for digests.  Before it: no variable; the
             for NCCL                                  connection is aborted.  After it: all ranks store the results,
                                                       an interrupted one at the end of the failed command.
Small        A valid plan with `scratch_views`         One, for digests and values.  Before it: no variable.  After it
                                                       signals are deferred: all ranks store the results.
Planned      Another valid plan, or                    One for digests.  Before it: no variable.  Then the barriers of
             `AllReduce.reduce_and_run` with           `Communicator.all_reduce`, and one after the start on GPUs,
             the plan of the speculative path          while signals are deferred, but for a limited time if a rank
                                                       waits.  A failure, or an interrupt after that time, may leave
                                                       some ranks with results, and others without or with a part.
Unplanned    No valid plan on some rank: the digests   One or more for layouts, in `prepare_replicas`.  Until all
             differ                                    shapes are found equal: no variable.  Then as small or planned,
                                                       without another barrier for digests.
===========  ========================================  ===============================================================
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np

from synkhronos.collectives.commands import VariableReplica, prepare_replicas
from synkhronos.containers import BoundedCache
from synkhronos.devices import (
    NUMPY,
    ArrayLayout,
    Communicator,
    Device,
    get_array_device,
    get_rank_device,
)
from synkhronos.devices.multi_host_communicator import MultiHostCommunicator, get_numpy_communicator
from synkhronos.devices.reduce_op import REDUCE_OPS
from synkhronos.devices.shared_memory_communicator import compute_aligned_nbytes, compute_nbytes
from synkhronos.graph_libraries import GraphLibrary
from synkhronos.graph_libraries.library import get_storage, has_other_references
from synkhronos.ranks import Command, PendingOperation, Rank
from synkhronos.ranks.interrupts import defer_signals

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class AllReduce(Command):
    """Reduce every rank's values into every rank's variables."""

    variable_keys: tuple[Any, ...]
    op: str
    uses_device_communicator: bool

    def run(self, rank: Rank) -> None:
        """All-reduce the variables in place.  Raise ValueError on all ranks if their shapes differ."""
        if rank.size == 1:
            return
        plan = self._get_valid_plan(rank)
        if plan is not None and plan.speculative_communicator is not None:
            if not plan.all_reduce_speculatively(rank, self.op):
                self._replace_plan(rank, digests_differ=True).all_reduce(rank, self.op)
        else:
            self._reduce_and_run(rank, plan, None, False)

    def reduce_and_run(self, rank: Rank, operation: Callable[[], T], is_collective: bool) -> T | None:
        """Reduce, then run an operation on all ranks or, after an interrupt of the master, on none of them.

        Small values in host memory take one barrier, and then the reduction is part of the operation.
        """
        return self._reduce_and_run(rank, self._get_valid_plan(rank), operation, is_collective)

    def _reduce_and_run(
        self, rank: Rank, plan: AllReducePlan | None, operation: Callable[[], T] | None, is_collective: bool
    ) -> T | None:
        """Reduce and run as `reduce_and_run`; ``plan`` is the result of `_get_valid_plan`."""
        if plan is not None and plan.scratch_views:
            have_reduced, result = plan.reduce_small_and_run(rank, self.op, operation, is_collective)
            if have_reduced:
                return result
            plan = self._replace_plan(rank, digests_differ=True)
        else:
            plan = self._agree_on_plan(rank, plan)
        if plan.scratch_views:
            return plan.reduce_small_and_run(rank, self.op, operation, is_collective, have_agreed=True)[1]
        plan.all_reduce(rank, self.op)
        if operation is None:
            return None
        plan.wait_until_started()
        return rank.run_on_all_or_no_rank(operation, is_collective)

    def agree_on_plan(self, rank: Rank) -> AllReducePlan:
        """Return the plan, after all ranks have made new ones if theirs differ; a collective operation."""
        return self._agree_on_plan(rank, self._get_valid_plan(rank))

    def _agree_on_plan(self, rank: Rank, plan: AllReducePlan | None) -> AllReducePlan:
        if plan is None:
            return self._replace_plan(rank, digests_differ=False)
        return plan if rank.compare_digests(plan.digest) else self._replace_plan(rank, digests_differ=True)

    def _get_valid_plan(self, rank: Rank) -> AllReducePlan | None:
        """Return the plan that this rank has for the command, or None if it has none that is valid."""
        plan = rank.registry.get_or_create(_AllReducePlans).get(self)
        return plan if plan is not None and plan.is_valid(rank) else None

    def _replace_plan(self, rank: Rank, digests_differ: bool) -> AllReducePlan:
        """Make a new plan on all ranks; a collective operation.

        ``digests_differ`` means that all ranks have just compared digests that differ.
        """
        shareds = rank.get_objects(self.variable_keys)
        replicas = prepare_replicas(rank, shareds, self.uses_device_communicator, self.op, digests_differ)
        for replica in replicas:
            replica.check_equal_layouts("all_reduce")
        plan = AllReducePlan.from_replicas(rank, self.variable_keys, replicas)
        rank.registry.get_or_create(_AllReducePlans)[self] = plan
        return plan


@dataclass(frozen=True, slots=True)  # its attributes are read faster than those of a named tuple
class PlannedVariable:
    """A variable of a repeated all-reduce, its device, and the device and the communicator that transfer it."""

    key: Any
    library: GraphLibrary
    layout: ArrayLayout
    device: Device
    transport_device: Device
    communicator: Communicator


class AllReducePlan(NamedTuple):
    """Layouts of a repeated all-reduce, and generation of the device's connection; equal on all ranks.

    A plan holds no reference to a variable's current value: a device's array is written in place only if its container
    holds the only reference.  NumPy arrays always are.
    Each rank with a valid plan passes the digest to `Rank.compare_digests`.  ``device_communicator`` is the
    communicator of the rank's device, even if the variables are transferred through host memory.

    If ``speculative_communicator`` is not None, ranks start the all-reduce with it before they compare digests.  The
    results are written into ``targets`` (an array or None for each variable), so the variables are unchanged if some
    rank does not start.

    If all variables are small and transferred through host memory, ``scratch_views`` are views of scratch memory, as
    `SharedMemoryCommunicator.map_small_arrays` returns them, and else empty.  Ranks write their values there, and
    compare the digests, at one barrier.
    """

    variables: list[PlannedVariable]
    device_communicator: Communicator
    generation: int
    digest: bytes
    speculative_communicator: Any
    targets: list[Any]
    scratch_views: list[list[np.ndarray]]

    @classmethod
    def from_replicas(cls, rank: Rank, keys: Sequence[Any], replicas: Sequence[VariableReplica]) -> AllReducePlan:
        """Return the plan for replicas of equal shapes."""
        device_communicator = get_rank_device(rank).get_communicator(rank)
        generation = device_communicator.generation
        variables = [
            PlannedVariable(
                key,
                replica.library,
                replica.layouts[rank.number],
                replica.device,
                replica.transport_device,
                replica.communicator,
            )
            for key, replica in zip(keys, replicas, strict=True)
        ]
        layouts = [variable.layout for variable in variables]
        nbytes, speculative_communicator = sum(map(compute_nbytes, layouts)), None
        if 0 < nbytes <= device_communicator.max_speculative_nbytes:
            if all(variable.communicator is device_communicator for variable in variables):
                speculative_communicator = device_communicator
        host_communicator = get_numpy_communicator(rank)
        scratch_views = []
        if 0 < sum(map(compute_aligned_nbytes, layouts)) <= host_communicator.max_small_nbytes and all(
            variable.communicator is host_communicator for variable in variables
        ):
            scratch_views = host_communicator.map_small_arrays(layouts)
        # This digest differs from the one in `prepare_replicas`, which a rank without a valid plan compares.
        layouts_and_devices = tuple([(*variable.layout, variable.device.name) for variable in variables])
        # It is one of a text: pickles of equal layouts differ where an object is in one of them twice.
        digest = rank.compute_digest(repr(("plan", layouts_and_devices, generation)))
        targets = [None] * len(variables)
        return cls(variables, device_communicator, generation, digest, speculative_communicator, targets, scratch_views)

    def is_valid(self, rank: Rank) -> bool:
        """Whether the layouts of this rank's variables, and its connection, have not changed."""
        for variable in self.variables:
            value = variable.library.borrow_value(rank.get_object(variable.key))
            shape, dtype = variable.layout
            if get_array_device(value) is not variable.device or value.shape != shape or value.dtype != dtype:
                return False
        return self.device_communicator.generation == self.generation

    def reduce_small_and_run(
        self, rank: Rank, op: str, operation: Callable[[], T] | None, is_collective: bool, have_agreed: bool = False
    ) -> tuple[bool, T | None]:
        """Compare digests and reduce as `all_reduce`, and run an operation, on all ranks or on none of them.

        ``have_agreed`` means that all ranks have just agreed on the plan, so that digests are not compared.

        Return whether the digests are equal, and the operation's result.  If they differ, nothing has been changed.
        """
        communicator = get_numpy_communicator(rank)
        values_of_ranks = self.scratch_views[communicator.get_next_half()]
        for variable, values in zip(self.variables, values_of_ranks, strict=True):
            values[rank.number] = variable.device.to_numpy(variable.library.borrow_value(rank.get_object(variable.key)))
        barrier_number = rank.publish_digest(self.digest)

        def store_and_run() -> tuple[bool, T | None]:
            if not have_agreed and not rank.has_equal_digests(barrier_number):
                return False, None
            communicator.switch_scratch_halves()
            for variable, values in zip(self.variables, values_of_ranks, strict=True):
                shared, library, device = rank.get_object(variable.key), variable.library, variable.device
                value = library.borrow_value(shared)
                array = NUMPY.as_writable(value, True) if device is NUMPY else np.empty(*variable.layout)
                array[...] = REDUCE_OPS[op].reduce_first_axis(values)
                new = array if device is NUMPY else device.from_numpy(array)
                if new is not value:
                    library.store_value(shared, new)
            result = None if operation is None else operation()
            if is_collective:  # only now: a rank without a plan has compared digests by `agree_on_plan`
                rank.barrier()
            return True, result

        return rank.run_on_all_or_no_rank(store_and_run)

    def all_reduce(self, rank: Rank, op: str) -> None:
        """Reduce into every rank's variables."""
        written = []
        # Once all ranks have started, each of them has to store the results.
        with rank.barriers.defer_signals_until_late():
            for variable in self.variables:
                shared, library, device = rank.get_object(variable.key), variable.library, variable.device
                if variable.transport_device is not device:
                    array = np.array(device.to_numpy(library.borrow_value(shared)), order="C")
                    variable.communicator.all_reduce(array, op)
                    library.store_value(shared, device.from_numpy(array))
                    continue
                is_referenced = has_other_references(get_storage(shared))
                array = device.as_writable(library.borrow_value(shared), is_referenced)
                variable.communicator.all_reduce(array, op)
                written.append((library, shared, device, array))
            if any(isinstance(variable.communicator, MultiHostCommunicator) for variable in self.variables):
                rank.gather_bytes(b"")  # the master may only fail once no other rank waits for a part of an array
            if rank.is_master:  # else an interrupt after this block could abort what other ranks have not started
                self.wait_until_started()
            else:
                self.device_communicator.notify_started()
            is_complete = self.device_communicator.wait_briefly()
            for library, shared, device, array in written:
                new = device.rewrap(array, is_complete)
                if new is not library.borrow_value(shared):
                    library.store_value(shared, new)

    def all_reduce_speculatively(self, rank: Rank, op: str) -> bool:
        """Reduce as `all_reduce`, but start before the ranks have compared their digests.

        Return False if the digests differ: then the variables are not changed, and the connection is aborted.
        """
        started = rank.registry.get_or_create(_StartedAllReduce, lambda: _StartedAllReduce(rank))
        started.begin(self)
        try:
            return self._start_and_store(rank, op, started)
        except BaseException:
            if not rank.is_master:  # at a worker's next command, other ranks may have overwritten their digests
                rank.barriers.fail_command()
                rank.barriers.wait_until_decided(rank.command_number)
                started.resolve_failed_command(rank.command_number)
            raise

    def _start_and_store(self, rank: Rank, op: str, started: _StartedAllReduce) -> bool:
        communicator, targets, values = self.speculative_communicator, self.targets, []
        for i, variable in enumerate(self.variables):
            # Memory is allocated before NCCL waits for the peers, for which CUDA might then wait, too.
            if targets[i] is None:
                targets[i] = variable.device.empty(*variable.layout)
            values.append(variable.device.as_contiguous(variable.library.borrow_value(rank.get_object(variable.key))))
        for i, value in enumerate(values):
            communicator.all_reduce_into(value, op, targets[i])
            targets[i] = self.variables[i].device.rewrap(targets[i], is_complete=True)  # while the GPU is busy
        del values, value  # `has_other_references` would count these references
        have_all_started = communicator.compare_digests_after_start(self.digest)
        if have_all_started and communicator.wait_briefly():
            started.results, old_arrays = list(targets), []
            for variable, new in zip(self.variables, targets, strict=True):
                shared, library, device = rank.get_object(variable.key), variable.library, variable.device
                is_referenced = has_other_references(get_storage(shared))
                old = library.borrow_value(shared)
                old_arrays.append(None if is_referenced or device.as_contiguous(old) is not old else old)
                library.store_value(shared, new)
            targets[:] = old_arrays
        elif have_all_started:
            started.store()
        started.end()
        return have_all_started

    def wait_until_started(self) -> None:
        """Wait until all ranks have started `all_reduce`, so that it completes on all of them."""
        if self.generation:
            self.device_communicator.wait_until_started()


class _StartedAllReduce(PendingOperation):
    """An all-reduce that a rank has started speculatively, and whose results it has not stored yet.

    ``plan`` is None if there is none.
    Once all ranks have started the all-reduce, each of them has to store the results.  A rank that is interrupted in
    between stores them at the end of the failed command.
    """

    def __init__(self, rank: Rank):
        self._rank, self._barrier_number = rank, 0
        self.plan: AllReducePlan | None = None
        self.results: list[Any] = []
        rank.pending_operations.append(self)

    def begin(self, plan: AllReducePlan) -> None:
        """Record the plan, and the barrier at which the ranks compare its digest."""
        self._barrier_number, self.results = self._rank.barriers.next_number, plan.targets
        self.plan = plan

    def end(self) -> None:
        """Record that nothing is left to store."""
        self.plan, self.results = None, []

    def store(self) -> None:
        """Store the results of an all-reduce that all ranks have started.  The results may not be complete yet."""
        plan = self.plan
        assert plan is not None
        with defer_signals():  # the launch in `rewrap` deletes the old objects
            plan.speculative_communicator.record_pending_writes()
            for variable, result in zip(plan.variables, self.results, strict=True):
                shared = self._rank.get_object(variable.key)
                variable.library.store_value(shared, variable.device.rewrap(result))
            plan.targets[:] = [None] * len(plan.targets)
            self.end()

    def resolve_failed_command(self, command_number: int) -> None:
        """Store the results of a failed command if all ranks have started the all-reduce; discard them otherwise."""
        rank, plan = self._rank, self.plan
        if plan is None:
            return
        if (rank.barriers.read_last_common_barrier(command_number) or 0) >= self._barrier_number:
            if rank.has_equal_digests(self._barrier_number):
                self.store()
            else:
                plan.speculative_communicator.abort()
        self.end()


class _AllReducePlans(BoundedCache[AllReduce, AllReducePlan]):
    """A rank's plans of repeated all-reduces, by command.

    The other ranks may have other plans, or none.  So they compare digests whenever they use these plans.
    """
