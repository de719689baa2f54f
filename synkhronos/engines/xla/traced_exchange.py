"""The collectives within an XLA program, while JAX traces it.

The gradient is sent in chunks.  The collective of a chunk starts as soon as the chunk is computed, on a side stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from synkhronos.devices.jax.ffi_collectives import FfiCollectives
from synkhronos.devices.jax.nccl_handlers import NcclCallMode
from synkhronos.devices.jax.xla_communicator import Collective
from synkhronos.engines.engine import StepShards
from synkhronos.engines.xla.jaxpr_evaluator import JaxprEvaluator
from synkhronos.engines.xla.vector_parts import can_write_parts, trace_in_place, write_parts
from synkhronos.graph_libraries.library import get_storage
from synkhronos.lowering.jax_function import JaxFunction
from synkhronos.variable_types import Array

#: Minimal number of bytes of a chunk of the gradient, whose all-reduce overlaps the rest of the backward pass.  XLA
#: fuses no operations across the start of a chunk.  Between GPUs of one machine this costs more than the overlap
#: saves, unless a gradient is long.
MIN_CHUNK_NBYTES = 128_000_000
#: `MIN_CHUNK_NBYTES` for ranks on several machines, whose network is slower.
MIN_CHUNK_NBYTES_OF_HOSTS = 25_000_000


class ExchangeSpec(NamedTuple):
    """Exchange of a shared variable's new value between the ranks, within a launch.

    Without ``shards`` it is an all-reduce.  With ``shards``, the variable is a matrix with a row for each rank: a
    reduce-scatter reduces this rank's row, and all-gathers after the second function exchange the updated rows.

    If the connection is aborted during the launch, the other variables keep their old values, unless their new values
    have another shape; the reduced variable's value is undefined.
    """

    #: Storage of the variable.
    storage: list[Any]
    #: Dtype in which the values except the last ``n_tail_items`` are sent; None for their own dtype.  Their sum could
    #: overflow in it, so they are divided by ``n_ranks`` before they are sent.  Without a wire dtype, NCCL divides.
    wire_dtype: str | None = None
    n_ranks: int = 1
    n_tail_items: int = 1
    #: As in `FfiCollectives`.
    nccl_call_mode: NcclCallMode = "python"
    #: A key of ``NCCL_OPS``.
    op: str = "sum"
    #: Whether the ranks are on several hosts.
    spans_hosts: bool = False
    shards: StepShards | None = None

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """Names of the collectives of one computation, in their order."""
        if self.shards is None:
            return ("all_reduce",)
        if self.shards.gathers_gradient:
            return ("reduce_scatter", "all_gather", "all_gather")
        return ("reduce_scatter", "all_gather")

    @property
    def key(self) -> tuple[Any, ...]:
        """Hashable value that identifies the specification."""
        return (id(self.storage), *self[1:-1], self.shards and id(self.shards.row))


class TracedExchange:
    """The exchange of one computation by an all-reduce, while it is traced.

    In a loop, ``iterations`` has a value that differs in each iteration; see `FfiCollectives.trace_finish`.
    """

    def __init__(self, spec: ExchangeSpec, ffi_collectives: FfiCollectives, iterations: Sequence[Any]):
        self._spec, self._ffi_collectives, self._iterations = spec, ffi_collectives, iterations
        #: As `FfiCollectives.trace_finish` returns it; None before the first function.
        self._is_valid: Any = None

    def trace_function(self, function: JaxFunction, operands: Sequence[Any]) -> Sequence[Array]:
        """Trace the next function, and the exchange that follows the first one.  Return the function's results."""
        if self._is_valid is not None:
            return trace_in_place(function, operands)
        evaluator, arrays = self._reduce(function, operands)
        return evaluator.compute_results(_concatenate(arrays))

    def keep_old_if_invalid(self, storage_id: int, new_value: Any, old_value: Any) -> Array:
        """Return a variable's new value if the collectives are valid, else the old one.

        If their shapes differ, return the new value: the shape of a traced result can't depend on the flag.
        """
        import jax.numpy as jnp

        if storage_id == id(self._spec.storage) or new_value is old_value or new_value.shape != old_value.shape:
            return new_value
        return jnp.where(self._get_valid_flag(storage_id) != 0, new_value, old_value)

    def _get_valid_flag(self, storage_id: int) -> Any:
        return self._is_valid

    def _reduce(self, function: JaxFunction, operands: Sequence[Any]) -> tuple[JaxprEvaluator, list[Array]]:
        """Trace the part of a function that computes the variable, and the reduction of the variable's parts.

        The all-reduce of the last parameters' gradients starts while the gradients of earlier parameters are computed.
        """
        import jax.numpy as jnp

        spec = self._spec
        position = _find_position(function.result_storages, spec.storage)
        evaluator = JaxprEvaluator(function.run, operands, function.n_outputs, position)
        parts = evaluator.parts
        own_dtype = parts[0].aval.dtype
        dtype = spec.wire_dtype if parts[0].aval.ndim == 1 else None
        n_tail_items = spec.n_tail_items if dtype is not None else 0
        itemsize = jnp.dtype(dtype or own_dtype).itemsize
        chunks = [parts] if self._iterations else self._group_into_chunks(parts, itemsize, n_tail_items)
        old_value = operands[_find_operand_position(function, spec.storage)]

        def compute_chunk(chunk: list[Any]) -> Array:
            """Return the values of a chunk without the tail, as one array in the dtype in which it is sent."""
            values = evaluator.compute(chunk)
            if dtype is not None:
                values = _split_tail(values, n_tail_items)[0] if chunk is chunks[0] else values
                values = [(value / spec.n_ranks).astype(dtype) for value in values]
            if can_write_parts(old_value, values):
                return write_parts(old_value, values)
            return _concatenate(values)

        def compute_tail() -> list[Array]:
            # The number of rows, and running averages, would lose too much precision in the wire dtype.
            vectors = _split_tail(evaluator.compute(chunks[0]), n_tail_items)[1] if dtype is not None else []
            return [jnp.concatenate(vectors) / spec.n_ranks] if vectors else []

        arrays, self._is_valid = self._trace_chunks(
            evaluator, chunks, compute_chunk, np.int32(0), self._get_reduced_shape, compute_tail
        )
        tail = [arrays.pop()] if dtype is not None else []
        return evaluator, [*[array.astype(own_dtype) for array in reversed(arrays)], *tail]

    def _get_reduced_shape(self, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return the shape of an array's reduction, or None if it is in place."""
        return None

    def _group_into_chunks(self, parts: Sequence[Any], itemsize: int, n_tail_items: int = 0) -> list[list[Array]]:
        """Group consecutive parts of a vector into chunks, from the end of the vector to its start.

        Each chunk except the last has at least `MIN_CHUNK_NBYTES`, or `MIN_CHUNK_NBYTES_OF_HOSTS`.  The first one has
        more than ``n_tail_items`` items.
        """
        min_nbytes = MIN_CHUNK_NBYTES_OF_HOSTS if self._spec.spans_hosts else MIN_CHUNK_NBYTES
        chunks: list[list[Any]] = [[]]
        for part in reversed(parts):
            size = sum(member.aval.size for member in chunks[-1])
            if size * itemsize >= min_nbytes and (len(chunks) > 1 or size > n_tail_items):
                chunks.append([])
            chunks[-1].insert(0, part)
        return chunks

    def _trace_chunks(
        self,
        evaluator: JaxprEvaluator,
        chunks: Sequence[list[Any]],
        compute_chunk: Callable[[list[Any]], Any],
        token: Array,
        get_result_shape: Callable[[tuple[int, ...]], tuple[int, ...] | None],
        compute_tail: Callable[[], list[Any]] = list,
    ) -> tuple[list[Array], Array]:
        """Trace the collective on chunks, each of which starts before the next chunk is computed.

        The first chunk is sent after ``token``, 0, is computed.  ``get_result_shape`` takes the shape of an array, and
        returns that of its result; None for a result in place.  ``compute_tail`` returns further arrays to send.  The
        results of the chunks and of the tail are returned with the flag of `FfiCollectives.trace_finish`.
        """
        started, kept_operands = [], []
        for chunk in chunks[:-1]:
            array = compute_chunk(chunk)
            shape = get_result_shape(array.shape)
            result, token = self._ffi_collectives.trace_start(array, token, shape)
            token = evaluator.delay_until(token)
            started.append(result)
            kept_operands += [array] if shape is not None else []
        arrays = [compute_chunk(chunks[-1]), *compute_tail()]
        shapes = [get_result_shape(array.shape) for array in arrays]
        return self._ffi_collectives.trace_finish(arrays, started, token, [*self._iterations, *kept_operands], shapes)


class TracedShardedExchange(TracedExchange):
    """The exchange of one computation with a sharded optimizer::

        gradient     block of columns ──> reduce-scatter (side stream) ──> block of this rank's row
        update       block of this rank's row ──> new block ──> all-gather (side stream) ──> new block of columns
        new values   columns of all blocks ──> whole parameters

    The first blocks are of the last parameters, whose gradients are computed first.
    """

    def __init__(self, spec: ExchangeSpec, ffi_collectives: FfiCollectives, iterations: Sequence[Any]):
        super().__init__(spec, ffi_collectives, iterations)
        assert spec.shards is not None
        self._shards, self._row_storage = spec.shards, get_storage(spec.shards.row)
        #: Blocks of this rank's reduced row; before the second function.
        self._row_blocks: list[Any] = []
        #: All ranks' updated rows, and the flag of the reduced row; after the second function.
        self._matrix: Any = None
        self._is_row_valid: Any = None

    def trace_function(self, function: JaxFunction, operands: Sequence[Any]) -> Sequence[Array]:
        """Trace the next function, and the collectives that follow it.  Return the function's results."""
        if self._is_valid is None:
            return self._trace_gradient(function, operands)
        if self._is_row_valid is None:
            return self._trace_update(function, operands)
        storages = [*[None] * function.n_inputs, *function.storages]
        operands = [self._matrix if s is self._spec.storage else o for s, o in zip(storages, operands, strict=True)]
        return trace_in_place(function, operands)

    def _get_reduced_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape[1:]

    def _get_valid_flag(self, storage_id: int) -> Any:
        # This rank's shards are updated at once, in place.  They are valid if the rank's row is.
        is_state_shard = any(storage_id == id(get_storage(shard)) for shard in self._shards.state_shards)
        return self._is_row_valid if is_state_shard else self._is_valid

    def _trace_gradient(self, function: JaxFunction, operands: Sequence[Any]) -> Sequence[Array]:
        """Trace the function.  Its result for the matrix is the old value, or all ranks' reduced rows if gathered."""
        import jax.numpy as jnp

        evaluator, self._row_blocks = self._reduce(function, operands)
        matrix = operands[_find_operand_position(function, self._spec.storage)]
        if self._shards.gathers_gradient:
            (matrix,), self._is_valid = self._ffi_collectives.trace_finish(
                [jnp.concatenate(self._row_blocks)], shapes=[matrix.shape]
            )
        return evaluator.compute_results(matrix)

    def _trace_update(self, function: JaxFunction, operands: Sequence[Any]) -> Sequence[Array]:
        """Trace the function.  Its result for the row is the old value."""
        import jax.numpy as jnp

        start = _find_operand_position(function, self._row_storage)
        stop, n_ranks = start + len(self._row_blocks), self._spec.n_ranks

        def run(*arguments: Any) -> Sequence[Array]:
            return function.run(*arguments[:start], jnp.concatenate(arguments[start:stop]), *arguments[stop:])

        evaluator = JaxprEvaluator(
            run,
            [*operands[:start], *self._row_blocks, *operands[start + 1 :]],
            function.n_outputs,
            _find_position(function.result_storages, self._row_storage),
            delayed_arguments=range(start, stop),
        )
        chunks = self._group_into_chunks(evaluator.parts, n_ranks * self._row_blocks[0].dtype.itemsize)
        self._is_row_valid = self._is_valid
        token = self._is_row_valid >> 1  # 0, after the last collective: a chunk may not depend on what it has reduced
        blocks, self._is_valid = self._trace_chunks(
            evaluator,
            chunks,
            lambda chunk: _concatenate(evaluator.compute(chunk)),
            token,
            lambda shape: (n_ranks, *shape),
        )
        self._matrix = jnp.concatenate(blocks[::-1], axis=1)
        return evaluator.compute_results(operands[start])


def _find_position(storages: Sequence[list[Any]], wanted: list[Any]) -> int:
    """Return the position of a storage, compared by identity."""
    return next(i for i, storage in enumerate(storages) if storage is wanted)


def _find_operand_position(function: JaxFunction, storage: list[Any]) -> int:
    """Return the position of a storage's value among the operands of a function."""
    return function.n_inputs + _find_position(function.storages, storage)


def _concatenate(arrays: Sequence[Array]) -> Array:
    """Concatenate arrays along the last axis.  Return a single array, which may be a scalar, unchanged."""
    import jax.numpy as jnp

    return arrays[0] if len(arrays) == 1 else jnp.concatenate(arrays, axis=-1)


def _split_tail(vectors: Sequence[Any], n_tail_items: int) -> tuple[list[Array], list[Array]]:
    """Split consecutive vectors before their last ``n_tail_items`` items.  Return the vectors of both parts."""
    head = list(vectors)
    tail_vectors: list[Any] = []
    while n_tail_items > 0:
        vector = head.pop()
        tail_vectors.insert(0, vector[-n_tail_items:])
        if len(vector) > n_tail_items:
            head.append(vector[:-n_tail_items])
        n_tail_items -= len(vector)
    return head, tail_vectors
