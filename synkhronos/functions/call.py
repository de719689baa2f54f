"""The command that runs a computation on all ranks.

Each rank selects its rows of the inputs, computes, and passes its outputs to the engine.  The engine reduces them over
the ranks, or stores them until they are read.

The first call of a variant compiles it.  The order of the ranks depends on the compiler (`CompileOrder`)::

    MASTER_FIRST    the master compiles  |barrier|  the workers compile, from the cache on disk
    IN_PARALLEL     all ranks compile
    AT_FIRST_CALL   all ranks rewrite the graph; the master computes  |barrier|  the workers compute, from the cache
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from synkhronos.data_objects.rows import get_share_slice, select_rows, split_selection
from synkhronos.devices import NUMPY, Selection
from synkhronos.engines import Runner
from synkhronos.engines.accumulator import Accumulator
from synkhronos.engines.outputs import RankOutputs, compute_no_outputs
from synkhronos.functions.computation import CompiledVariant, Computation, RowSelector, Variant
from synkhronos.functions.rank_mean_context import RankMeanContext
from synkhronos.functions.slow_warning import warn_if_slow
from synkhronos.graph_libraries.library import CompileOrder
from synkhronos.ranks import ArrayLocation, Command, Rank, RowAccess


class ScatteredInput(NamedTuple):
    """An input whose rows are divided among the ranks."""

    array: ArrayLocation
    #: Selected rows of all ranks together.
    rows: range | ArrayLocation
    #: Row number of the array's first row in the numbering of `rows`: above 0 only for a minibatch.
    first_row: int = 0

    def get_row_access(self, size: int, host_ranks: range) -> RowAccess:
        """Return the rows of the array that the consecutive ``host_ranks`` read.  There are ``size`` ranks."""
        first, last = (get_share_slice(self._n_rows, size, r) for r in (host_ranks[0], host_ranks[-1]))
        rows = self.rows
        share = rows[first.start : last.stop] if isinstance(rows, range) else rows.slice_items(first.start, last.stop)
        return RowAccess(self.array, share, self.first_row)

    @property
    def _n_rows(self) -> int:
        return len(self.rows) if isinstance(self.rows, range) else self.rows.shape[0]

    def select_share(self, rank: Rank) -> Selection:
        """Return the array's rows that this rank computes."""
        rows: Selection = self.rows if isinstance(self.rows, range) else self.rows.view(rank.segments)
        share = rows[get_share_slice(len(rows), rank.size, rank.number)]
        if not self.first_row:
            return share
        if isinstance(share, range):
            return range(share.start - self.first_row, share.stop - self.first_row, share.step)
        return share - self.first_row


class _CallFields(NamedTuple):
    """Fields of `Call`, as a base class of its own, since a named tuple cannot have a second base class."""

    #: Key of the computation among the ranks' objects.
    computation_key: Any
    variant: Variant
    #: Whether ranks may need to compile the variant; False once the master has had a result of it.
    may_need_compile: bool
    #: A broadcast input is an `ArrayLocation`; every rank reads all of its rows.
    inputs: tuple[ScatteredInput | ArrayLocation, ...]
    #: Number of selected rows of all ranks together; None if no input is scattered.
    n_total_rows: int | None
    #: Selected rows of the sliceable shared variables, one selection for each rank; None for all rows.
    batch_s: tuple[slice | ArrayLocation, ...] | None
    #: Number of slices in which each rank computes its rows.
    num_slices: int
    has_updates: bool
    #: Whether outputs are reduced in this command, even by an engine that would store them until they are read.
    must_reduce_outputs: bool = False


class Call(_CallFields, Command):
    """Run a computation on all ranks."""

    __slots__ = ()

    @property
    def is_sliced(self) -> bool:
        """Whether each rank computes its rows in several slices."""
        return self.num_slices > 1

    @property
    def effect_sentence(self) -> str | None:
        """Sentence for error messages: what the command has changed if a rank fails later; or None."""
        return "The function's updates were applied" if self.has_updates else None

    def find_row_accesses(self, size: int, host_ranks: range) -> Iterator[RowAccess]:
        """Yield the accesses of some ranks: their rows of the inputs, and their selections in `batch_s`."""
        for value in self.inputs:
            yield value.get_row_access(size, host_ranks) if isinstance(value, ScatteredInput) else RowAccess(value)
        for selection in () if self.batch_s is None else self.batch_s[host_ranks.start : host_ranks.stop]:
            if isinstance(selection, ArrayLocation):
                yield RowAccess(selection)

    def run(self, rank: Rank) -> Any:
        return self.compile_and_bind(rank).run()

    def compile_and_bind(self, rank: Rank) -> RankCall:
        """Compile the variant if needed, and return the call with this rank's rows; a collective operation.

        Ranks may wait for each other while they compile, so all call this at the same point of a command.
        """
        computation: Computation = rank.get_object(self.computation_key)
        if self.may_need_compile:
            self._compile(computation, rank)
        return RankCall(self, computation, computation.get_or_compile(self.variant), rank)

    def _compile(self, computation: Computation, rank: Rank) -> None:
        """Compile the variant, in the order of ranks that the library requires.

        The library's configuration, such as PyTensor's linker, and thus the order, may differ between ranks.
        """
        is_master_first = any(rank.all_gather_if_different(computation.compile_order == CompileOrder.MASTER_FIRST))
        if rank.is_master:
            work = "rewriting the graph of" if computation.compile_order == CompileOrder.AT_FIRST_CALL else "compiling"
            with warn_if_slow(f"{work} {computation.name}"):
                computation.get_or_compile(self.variant)
        if is_master_first:
            rank.barrier()
        computation.get_or_compile(self.variant)


class RankCall:
    """A call on one rank: its rows, its compiled variant, and the outputs."""

    def __init__(self, call: Call, computation: Computation, compiled: CompiledVariant, rank: Rank):
        self.call, self._rank = call, rank
        self.computation, self.compiled = computation, compiled
        self._runner = compiled.runner
        self._arrays: list[ArrayLocation] = []
        self._shares: list[Selection | None] = []
        # Inputs with the same rows share one selection, which devices copy only once.
        shares: dict[Any, Selection] = {}
        for call_input in call.inputs:
            if isinstance(call_input, ScatteredInput):
                share = shares.get((call_input.rows, call_input.first_row))
                if share is None:
                    share = shares[call_input.rows, call_input.first_row] = call_input.select_share(rank)
                self._arrays.append(call_input.array)
                self._shares.append(share)
            else:
                self._arrays.append(call_input)
                self._shares.append(None)
        self._sliceable_rows = self._select_sliceable_rows() if call.variant.row_selector is not None else None
        #: Outputs, reduced over slices; empty before `compute`.
        self.output_values: list[Any] = []
        #: Number of rows to compute: the weight of the outputs in a mean.  1 if the function has no inputs with rows.
        self.n_rows = 1
        if call.n_total_rows is not None:
            first_share = self._shares[0]  # scattered inputs come first
            assert first_share is not None
            self.n_rows = len(first_share)
        elif computation.sliceable_shareds:
            self.n_rows = (
                self._get_sliceable_lengths()[0] if self._sliceable_rows is None else len(self._sliceable_rows)
            )
        self.has_rows = self.n_rows > 0

    def run(self, fused_runner: Runner | None = None, records_effect: bool = True) -> Any:
        """Compute this rank's rows, and pass the outputs to the engine.

        A `fused_runner` takes the place of the function's own; it launches a program that contains the function.
        ``records_effect`` is False if the function's updates are not the command's effect.

        Return the result of `Engine.reduce_or_store_outputs`, or the reduced outputs if `Call.must_reduce_outputs`.
        """
        rank, call, n_rank_means = self._rank, self.call, self.compiled.n_rank_means
        if fused_runner is not None:
            self._runner = fused_runner
        if n_rank_means:
            self._check_rank_means()
        writes_disk_cache = call.may_need_compile and self._agree_on_disk_cache()
        if self.has_rows or (call.n_total_rows == 0 and rank.is_master):
            if call.may_need_compile:
                self._compute_first_time(writes_disk_cache)
            else:
                self.compute()
            if records_effect and self.has_rows:
                rank.record_effect()
        elif n_rank_means:
            RankMeanContext(rank.all_gather_bytes, n_rank_means).contribute_no_rows()
        elif writes_disk_cache:
            rank.barrier()
        if call.may_need_compile:
            rank.thread_limit.apply()  # the compiled code may have loaded a BLAS
        if not self.compiled.output_spec.ops:
            return []
        outputs, engine = self.get_outputs(), self.computation.engine
        if call.must_reduce_outputs:
            outputs = outputs.prepare_deferred_reduction(rank)
            return outputs.with_values(engine.fetch_outputs(outputs.values)).reduce(rank)
        return engine.reduce_or_store_outputs(rank, outputs)

    def _check_rank_means(self) -> None:
        """Raise ValueError on all ranks for a call whose means over ranks are not defined."""
        call = self.call
        if call.is_sliced:
            self._rank.raise_common_error(
                ValueError(
                    f"num_slices: expected 1, got {call.num_slices}: {self.computation.name} has means over all ranks' "
                    "rows (rank_mean, sync=True), and a slice has other means than the batch"
                )
            )
        if call.n_total_rows == 0:
            self._rank.raise_common_error(
                ValueError("batch: expected at least one row for a mean over ranks, got none")
            )

    def _agree_on_disk_cache(self) -> bool:
        """Whether the first launch compiles, and writes the compiled code to the cache on disk, on any rank.

        All ranks call it.  The library's configuration, and thus this rank's answer, may differ between ranks.
        """
        if self.compiled.n_rank_means:
            return False  # all ranks have to compute at the same time
        writes_cache = self.computation.library.writes_cache_at_first_call(self.compiled.function)
        return any(self._rank.all_gather_if_different(writes_cache))

    def _compute_first_time(self, writes_disk_cache: bool) -> None:
        """Compute for the first time: the master before the workers if ranks write the cache on disk."""
        rank = self._rank
        if writes_disk_cache and not rank.is_master:
            rank.barrier()
        is_slow = rank.is_master and self.computation.compile_order == CompileOrder.AT_FIRST_CALL
        with warn_if_slow(f"compiling {self.computation.name}") if is_slow else contextlib.nullcontext():
            self.compute()
        if writes_disk_cache and rank.is_master:
            rank.barrier()

    def get_outputs(self) -> RankOutputs:
        """Return the outputs with their weight and specification."""
        spec, n_repeats = self.compiled.output_spec, self._runner.n_repeats
        if n_repeats > 1:
            return RankOutputs(self.n_rows // n_repeats, self.output_values, spec.repeat(n_repeats))
        compute_zero_rows = self._compute_zero_rows if self.call.n_total_rows is None else compute_no_outputs
        return RankOutputs(self.n_rows, self.output_values, spec, compute_zero_rows)

    def _compute_zero_rows(self) -> list[Any]:
        self.compute()
        return self.output_values

    def _get_sliceable_lengths(self) -> list[int]:
        library = self.computation.library
        return [library.borrow_value(shared).shape[0] for shared in self.computation.sliceable_shareds]

    def _select_sliceable_rows(self) -> Selection:
        """Return the selected rows of this rank's sliceable shared variables.

        The ranks agree that all selected rows exist before any rank computes, so that a wrong index changes nothing.
        """
        lengths, rank = self._get_sliceable_lengths(), self._rank
        names = [shared.name for shared in self.computation.sliceable_shareds]
        description = f"sliceable_shareds: {names} have {lengths} rows on rank {rank.number}"
        if self.call.batch_s is None:
            if min(lengths) != max(lengths):
                raise ValueError(
                    f"{description}; num_slices needs equally many rows in all of them, or batch_s to select rows"
                )
            return range(lengths[0])
        selected = self.call.batch_s[rank.number]
        problem: tuple[type[Exception], str] | None = None
        batch_s = selected.view(rank.segments) if isinstance(selected, ArrayLocation) else selected
        rows: Selection = range(0)
        try:
            rows, *others = [select_rows(batch_s, length, "batch_s") for length in sorted(set(lengths))]
            # Rows beyond the shortest variable are not used, but rows counted from the end would be different ones.
            if not all(np.array_equal(rows, [row for row in other if row < min(lengths)]) for other in others):
                problem = ValueError, f"{description}, and batch_s selects different rows of them"
        except IndexError as error:
            problem = IndexError, f"{error} on rank {rank.number}"
        problems = [p for p in rank.all_gather_if_different(problem) if p is not None]
        if problems:
            error_class, message = problems[0]
            rank.raise_common_error(error_class(message))
        return rows

    def compute(self) -> None:
        """Compute this rank's rows, slice by slice with ``num_slices``, and set `output_values`."""
        call, ops = self.call, self.compiled.output_spec.ops
        if not self.n_rows:
            # No rank has rows: like the serial library, compute the outputs of zero rows.  Only random
            # generators are updated, in the master.
            self._runner = self.computation.get_or_compile(call.variant._replace(returns_updates=True)).runner
            self.output_values = self._launch(self._shares, self._sliceable_rows)[: len(ops)]
            return
        if call.num_slices == 1:
            self.output_values = self._launch(self._shares, self._sliceable_rows)
            return
        lengths = [self.n_rows] if self._sliceable_rows is None else [self.n_rows, len(self._sliceable_rows)]
        n_slices = max(1, min(call.num_slices, *lengths))
        updates = self.computation.list_accumulated_updates()
        # "avg" weights ranks equally, but the slices of a rank by rows: together they are the rank's own mean.
        slice_ops = ["mean" if op == "avg" else op for op in ops]
        accumulators = [Accumulator(op) for op in [*slice_ops, *(op for _, op in updates)]]
        slices = [None if share is None else split_selection(share, n_slices) for share in self._shares]
        sliceable_slices = None if self._sliceable_rows is None else split_selection(self._sliceable_rows, n_slices)
        for i in range(n_slices):
            rows = [None if selection is None else selection[i] for selection in slices]
            sliceable_rows = None if sliceable_slices is None else sliceable_slices[i]
            counted_rows = sliceable_rows if call.n_total_rows is None else rows[0]
            n_rows = 1 if counted_rows is None else len(counted_rows)
            values = self._launch(rows, sliceable_rows)
            for accumulator, value in zip(accumulators, values, strict=True):
                accumulator.add(value, n_rows)
        results = [accumulator.get_result() for accumulator in accumulators]
        self.output_values = results[: len(ops)]
        library = self.computation.library
        for (shared, _), value in zip(updates, results[len(ops) :], strict=True):
            is_on_device = self.computation.device.must_move_shared_values and library.is_array(shared)
            library.store_value(shared, self.computation.device.as_array(value) if is_on_device else value)

    def _launch(self, rows: Sequence[Selection | None], sliceable_rows: Selection | None) -> list[Any]:
        """Launch the compiled function on the given rows of each input, None for all.  Return its outputs."""
        inputs = self._stage_inputs(rows, sliceable_rows)
        if n_rank_means := self.compiled.n_rank_means:
            with RankMeanContext(self._rank.all_gather_bytes, n_rank_means).activate():
                results = self._runner(*inputs)
                self._runner.wait(results)
            return results
        if self._rank.is_master and self._runner.record_signature_if_new(inputs):
            shapes = [getattr(value, "shape", ()) for value in inputs]
            with warn_if_slow(f"compiling {self.computation.name} for inputs of shapes {shapes}"):
                return self._runner(*inputs)
        return self._runner(*inputs)

    def _stage_inputs(self, rows: Sequence[Selection | None], sliceable_rows: Selection | None) -> list[Any]:
        """Return the compiled function's inputs: the given rows of each, on the device that it takes them from."""
        if not self.call.inputs and sliceable_rows is None:
            return []
        rank, computation = self._rank, self.computation
        devices = computation.choose_input_devices(self._runner)
        values = [
            device.transfers.stage_input(rank, array, selection, computation.buffers[position], spec.mutable)
            for position, (device, array, selection, spec) in enumerate(
                zip(devices, self._arrays, rows, computation.inputs, strict=True)
            )
        ]
        if sliceable_rows is not None:
            if self.call.variant.row_selector is RowSelector.SLICE:
                assert isinstance(sliceable_rows, range)
                values += [np.int64(sliceable_rows.start), np.int64(sliceable_rows.stop)]
            else:
                device = computation.device if computation.device.accepts_input(np.dtype(np.int64), 1) else NUMPY
                indexes = np.asarray(sliceable_rows, np.int64)
                values.append(device.transfers.stage_indexes(indexes, computation.buffers["rows"]))
        return values
