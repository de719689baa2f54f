"""Dispatch of a function's calls to the ranks, for the functions of users and for commands that contain several calls.

The state of a computation in a session::

    created ── distribute(), or the first call ──> distributed ── the user's code changes, or fork() again ──> created

The workers get the computation when it is distributed.  Each rank compiles a variant of it in the first call that needs
this variant.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from synkhronos import ranks
from synkhronos.checks import check_at_least, check_integer
from synkhronos.containers import WeakKeyDict
from synkhronos.data_objects.rows import BatchArgument
from synkhronos.devices.reduce_op import REDUCE_OPS
from synkhronos.functions.call import Call
from synkhronos.functions.computation import DEFAULT_VARIANT, Computation, RowSelector, Variant
from synkhronos.functions.inputs import CallInputWriter, has_only_contiguous_slices
from synkhronos.ranks import Session
from synkhronos.replication.replicator import Replicator
from synkhronos.replication.settings import sync_settings

_key_numbers = itertools.count()


class Dispatcher:
    """Makes the command of each call of a function, and sends the function's computation to the workers."""

    def __init__(self, computation: Computation):
        self.computation = computation
        #: Key of the computation among the ranks' objects.
        self.computation_key = ("function", next(_key_numbers))
        #: Session to whose workers the computation was sent; None before.
        self.distributed_session: Session | None = None
        self.input_writer = CallInputWriter(computation)
        #: Variants that all ranks have compiled.
        self._compiled_variants: set[Variant] = set()
        #: Replicator of `distributed_session`.
        self._replicator: Replicator
        #: `Replicator.n_values_set_on_master` at the last call: if it has grown, the user has set values meanwhile.
        self._last_n_master_values = 0
        #: Shared variables that the function reads, and those that it updates.
        self._accessed_shareds: tuple[set[Any], set[Any]] | None = None

    # -- calls -----------------------------------------------------------------------------------------------

    def call(self, *inputs: Any) -> list[Any]:
        """Call the function on all ranks, and return its outputs as arrays, even where users get a `Result`."""
        session = ranks.get_session()
        with session.call_lock:
            session.wait_until_idle()
            call = self.build_call(session, inputs)._replace(must_reduce_outputs=True)
            return self.finish_call(session, call, session.run(call))

    def build_call(
        self,
        session: Session,
        inputs: Sequence[Any] = (),
        named_inputs: dict[str, Any] | None = None,
        batch: BatchArgument = None,
        batch_s: Any = None,
        num_slices: int = 1,
        output_subset: Sequence[int] | None = None,
    ) -> Call:
        """Check the arguments of a call, put the inputs into shared memory, and return the command.

        The caller holds the session's `call_lock` until it has called `finish_call`.
        """
        variant = self._choose_variant(batch_s, num_slices, output_subset)
        call_inputs, n_rows = self.input_writer.write_inputs(session, inputs, named_inputs, batch)
        call_batch_s = None if batch_s is None else self.input_writer.write_batch_s(session, batch_s)
        has_updates = bool(self.computation.updates)
        try:
            self.ensure_distributed(session)
            if self._last_n_master_values != self._replicator.n_values_set_on_master:
                self._warn_of_master_values()
            self.computation.engine.prepare_call(session)
            if may_need_compile := variant not in self._compiled_variants:
                sync_settings(session)
        except Exception as error:
            if has_updates:  # errors of later stages have such a note too
                error.add_note("The function's updates were applied on no rank.")
            raise
        return Call(
            self.computation_key, variant, may_need_compile, call_inputs, n_rows, call_batch_s, num_slices, has_updates
        )

    def finish_call(self, session: Session, call: Call, command_result: Any) -> list[Any]:
        """Record that all ranks have compiled the call's variant, and convert its outputs.

        After a launch of several steps each output has several values.
        """
        self._compiled_variants.add(call.variant)
        if not command_result:
            return []
        if not call.must_reduce_outputs:
            command_result = self.computation.engine.make_results(session, command_result)
        return [np.asarray(result) if isinstance(result, np.generic) else result for result in command_result]

    @property
    def has_compiled_default(self) -> bool:
        """Whether the ranks have compiled the function without options, as of the last `ensure_distributed`."""
        return DEFAULT_VARIANT in self._compiled_variants

    # -- variants --------------------------------------------------------------------------------------------

    def _choose_variant(self, batch_s: Any, num_slices: Any, output_subset: Any) -> Variant:
        """Return the variant for the options of a call.  Raise TypeError or ValueError for invalid ones."""
        if batch_s is None and output_subset is None and type(num_slices) is int and num_slices == 1:
            return DEFAULT_VARIANT
        num_slices = check_at_least(num_slices, "num_slices", 1)
        if num_slices > 1:
            self._check_slicing(num_slices)
        row_selector = self._choose_row_selector(batch_s, num_slices)
        return Variant(row_selector, num_slices > 1, self._parse_output_subset(output_subset))

    def _check_slicing(self, num_slices: int) -> None:
        """Raise TypeError or ValueError if the function can't be computed in slices."""
        computation = self.computation
        if not computation.n_scattered and not computation.sliceable_shareds:
            raise ValueError(
                f"num_slices={num_slices}: {computation.name} has no scattered inputs and no sliceable_shareds "
                "to divide"
            )
        for shared, op in computation.list_accumulated_updates():
            if not computation.library.is_array(shared):
                if op is not None:
                    raise TypeError(
                        f"num_slices={num_slices}: the update of {shared.name!r} of type {shared.type} can't be "
                        "accumulated; give it the op None, which keeps the value of the last slice"
                    )
            elif op is not None and not REDUCE_OPS[op].can_reduce(np.dtype(shared.type.dtype)):
                raise ValueError(
                    f"num_slices={num_slices}: op {op!r} of the update of {shared.name!r} is not defined "
                    f"for dtype {shared.type.dtype}; give the update another op"
                )

    def _choose_row_selector(self, batch_s: Any, num_slices: int) -> RowSelector | None:
        """Return the kind of the inputs that select rows of sliceable shared variables, or None for all rows."""
        computation = self.computation
        if batch_s is not None and not computation.sliceable_shareds:
            raise ValueError(f"batch_s: {computation.name} was made without sliceable_shareds")
        if not computation.sliceable_shareds or (batch_s is None and num_slices == 1):
            return None
        if computation.updated_sliceable is not None:
            argument = "num_slices" if batch_s is None else "batch_s"
            raise ValueError(
                f"{argument}: {computation.name} updates {computation.updated_sliceable.name!r}, which is one of its "
                "sliceable_shareds: the update would replace all rows by values of the selected rows; update "
                "another variable, or leave this one out of sliceable_shareds"
            )
        is_contiguous = batch_s is None or has_only_contiguous_slices(batch_s)
        can_slice = is_contiguous and not computation.engine.requires_static_shapes
        return RowSelector.SLICE if can_slice else RowSelector.INDEXES

    def _parse_output_subset(self, output_subset: Any) -> tuple[int, ...] | None:
        """Return the indexes of the selected outputs, or None if all are."""
        if output_subset is None:
            return None
        if not isinstance(output_subset, list | tuple | np.ndarray | range):
            raise TypeError(f"output_subset: expected a list of output indexes, got {output_subset!r}")
        n, subset = len(self.computation.outputs), []
        for index in output_subset:
            index = check_integer(index, "output_subset", "integers")
            if not 0 <= index < n:
                raise IndexError(f"output_subset: {self.computation.name} has {n} outputs, got index {index}")
            subset.append(index)
        return tuple(subset)

    # -- distribution ----------------------------------------------------------------------------------------

    def ensure_distributed(self, session: Session) -> None:
        """Send the computation to the workers if they don't have it, or if user code in it has changed."""
        computation = self.computation
        if computation.user_code is not None and computation.user_code.update_if_changed():
            # The master compiles again, too: its compiled variants may hold the old code.
            computation.compiled_variants.clear()
            self.distributed_session = None
        if self.distributed_session is not session:
            _distribute(session, [self])

    def mark_distributed(self, session: Session) -> None:
        """Record that the workers have the computation."""
        self._replicator, self._last_n_master_values = Replicator.get_or_create(session), 0
        session.replacement_callbacks[self] = Dispatcher._handle_worker_replacement
        self._compiled_variants = set()
        self.computation.reset_if_engine_changed()
        session.rank.add_object(self.computation_key, self.computation, is_weak=True)
        session.memory.release_when_deleted(self, "object", self.computation_key)
        self.distributed_session = session  # last: after an interrupt, the next call starts again

    def _warn_of_master_values(self) -> None:
        """Warn of values that the user has set since the last call, if the function reads them."""
        computation, self._last_n_master_values = self.computation, self._replicator.n_values_set_on_master
        if self._accessed_shareds is None:
            self._accessed_shareds = set(computation.list_read_shareds()), {shared for shared, _ in computation.updates}
        self._replicator.warn_of_master_values(computation.name, *self._accessed_shareds)

    def _handle_worker_replacement(self) -> None:
        """Schedule the computation again if the workers were replaced by new processes; forks have inherited it."""
        if self.distributed_session is not None and not self.distributed_session.has_forked_workers:
            self.distributed_session = None
            schedule_distribution(self)


class _ScheduledDispatchers(WeakKeyDict[Dispatcher, bool]):
    """Dispatchers whose computations `distribute_scheduled` sends; others send theirs at their first call."""


def schedule_distribution(dispatcher: Dispatcher) -> None:
    """Add a dispatcher to those whose computations `distribute_scheduled` sends, if ranks are running."""
    with contextlib.suppress(RuntimeError):  # a function can be unpickled while no ranks are running
        ranks.get_session().registry.get_or_create(_ScheduledDispatchers)[dispatcher] = True


def distribute_scheduled(session: Session) -> None:
    """Send all scheduled computations to the workers."""
    _distribute(session, list(session.registry.get_or_create(_ScheduledDispatchers)))


def _distribute(session: Session, dispatchers: Sequence[Dispatcher]) -> None:
    """Send computations to workers that don't have them, in one message for each graph library."""
    dispatchers = [dispatcher for dispatcher in dispatchers if dispatcher.distributed_session is not session]
    dispatchers.sort(key=lambda dispatcher: dispatcher.computation_key)
    by_library: dict[str, list[Dispatcher]] = {}
    for dispatcher in dispatchers:
        by_library.setdefault(dispatcher.computation.library.name, []).append(dispatcher)
    for group in by_library.values():
        computations = [dispatcher.computation for dispatcher in group]
        variables = [variable for computation in computations for variable in computation.list_variables()]
        try:
            objects = [(dispatcher.computation_key, dispatcher.computation) for dispatcher in group]
            code = Replicator.get_or_create(session).send(objects, variables)
        except TypeError as error:
            # Pickle's error does not name the cause, which may be a keyword argument.
            for computation in computations:
                try:
                    computation.check_kwargs_picklable()
                except TypeError as own_error:
                    raise TypeError(f"{computation.name}: {own_error}") from own_error.__cause__
            raise TypeError(f"{', '.join(computation.name for computation in computations)}: {error}") from error
        for computation in computations:
            computation.user_code = code
    for dispatcher in dispatchers:
        dispatcher.mark_distributed(session)
        dispatcher.computation.move_shareds_to_device()
        session.registry.get_or_create(_ScheduledDispatchers).discard(dispatcher)
