"""The JAX function of an `Executable`: its PyTensor functions, the all-reduce after the first one, and a loop.

JAX traces the functions here, so their arrays are traced ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby, islice
from typing import Any, NamedTuple

import numpy as np

from synkhronos.devices.jax.ffi_all_reduce import FfiAllReduce
from synkhronos.devices.jax.scalar_log import ScalarLog
from synkhronos.engines.xla.jaxpr_evaluator import JaxprEvaluator
from synkhronos.lowering.jax_function import JaxFunction

#: Minimal number of bytes of a chunk of the gradient, whose all-reduce overlaps the rest of the backward pass.
MIN_CHUNK_BYTES = 25_000_000
#: Minimal number of bytes of a vector whose parts are written into its memory one after another.
MIN_NBYTES_IN_PLACE = 1 << 20
#: Minimal number of elements of a part that is copied alone.
MIN_PART_SIZE = 1 << 16


class AllReduceSpec(NamedTuple):
    """All-reduce of a shared variable's new value within a launch.

    If the connection is aborted during the launch, the other variables keep their old values, unless their new values
    have another shape; the reduced variable's value is undefined.

    Attributes
    ----------
    storage : list of one array
        The variable's storage.
    wire_dtype : str or None
        Dtype in which the values without the tail are sent; None for their own dtype.
    divisor : int
        Divisor of the values if there is a wire dtype, in which their sum could overflow: the number of ranks.  Without
        a wire dtype NCCL divides.
    n_tail : int
        Number of items at the vector's end that are always sent in their own dtype.
    nccl_caller : {"python", "native", "graph"}
        Code that calls NCCL within the launch, as in `FfiAllReduce`.
    op : str
        Name of the reduction.
    """

    storage: list[Any]
    wire_dtype: str | None = None
    divisor: int = 1
    n_tail: int = 1
    nccl_caller: str = "python"
    op: str = "sum"


def trace_functions(
    functions: Sequence[JaxFunction],
    spec: AllReduceSpec | None,
    ffi_all_reduce: FfiAllReduce | None,
    storages: Sequence[list[Any]],
    updated_storages: Sequence[list[Any]],
    logged_positions: Sequence[int],
    in_loop: bool,
    lengths: tuple[int, ...],
    *arguments: Any,
) -> tuple[Any, ...]:
    """Trace the functions and the all-reduce that follows the first one.

    Parameters
    ----------
    functions, spec, ffi_all_reduce
        As in `Executable`.
    storages, updated_storages : list of storages
        Storages of all shared variables, and of the updated ones.
    logged_positions : list of int
        Positions of the outputs that are appended to the log instead of being returned.
    in_loop : bool
        Whether this is the body of a loop.
    lengths : tuple of int
        Last arguments of the function, if there is a single one.
    *arguments : jax.Array
        As `Executable._get_arguments` returns them, after the lengths.

    Returns
    -------
    tuple of jax.Array
        Outputs that are not logged, new values of ``updated_storages``, arrays of the log.
    """
    n_inputs = sum(function.n_inputs for function in functions)
    n_arguments = n_inputs + len(storages)
    inputs = iter(arguments[:n_inputs])
    logs = arguments[n_arguments:]
    old_values = {id(s): a for s, a in zip(storages, arguments[n_inputs:n_arguments], strict=True)}
    current = dict(old_values)
    outputs: list[Any] = []
    is_valid: Any = None
    for function in functions:
        operands = [*islice(inputs, function.n_inputs), *[current[id(s)] for s in function.storages], *lengths]
        try:
            if spec is not None and ffi_all_reduce is not None and function is functions[0]:
                iteration = logs[0] if in_loop else None
                results, is_valid = _trace_all_reduce(function, operands, spec, ffi_all_reduce, iteration)
            else:
                results = _run_in_place(function, operands)
        except Exception:
            function.raise_with_graph_context()
            raise
        outputs += results[: function.n_outputs]
        for storage, result in zip(
            function.result_storages[function.n_outputs :], results[function.n_outputs :], strict=True
        ):
            current[id(storage)] = result
    if spec is not None:
        for key in old_values.keys() - {id(spec.storage)}:
            current[key] = _keep_old_if_invalid(is_valid, current[key], old_values[key])
    # Logged outputs are not returned: each would be a new array at a new address.
    unlogged = [output for i, output in enumerate(outputs) if i not in logged_positions]
    new_logs = ScalarLog.append(logs, [outputs[i] for i in logged_positions]) if logs else []
    return (*unlogged, *(current[id(storage)] for storage in updated_storages), *new_logs)


def _run_in_place(function: JaxFunction, operands: Sequence[Any]) -> Any:
    """Trace a function; copy the parts of a long vector, such as the gradient, into the memory of its old value.

    XLA's kernel that concatenates many arrays takes four times as long as copies.
    """
    if function.length_graph is not None:
        return function.run(*operands)  # lengths are numbers, which the evaluator would trace as arrays
    positions = {id(storage): function.n_inputs + i for i, storage in enumerate(function.storages)}
    for i, storage in enumerate(function.result_storages[function.n_outputs :], start=function.n_outputs):
        old_value = operands[positions[id(storage)]]
        if old_value.ndim != 1 or old_value.nbytes < MIN_NBYTES_IN_PLACE:
            continue
        evaluator = JaxprEvaluator(function.run, operands, function.n_outputs, i)
        types = [part.aval for part in evaluator.parts]
        if len(types) > 1 and types[0].dtype == old_value.dtype and sum(t.size for t in types) == old_value.size:
            return evaluator.finish(write_parts(old_value, evaluator.compute(evaluator.parts)))
    return function.run(*operands)


def write_parts(vector: Any, parts: Sequence[Any]) -> Any:
    """Return the concatenation of vectors, in the memory of ``vector``.  Short neighbours are copied together."""
    import jax.numpy as jnp
    from jax import lax

    start = 0
    for _, group in groupby(enumerate(parts), lambda item: item[0] if item[1].size >= MIN_PART_SIZE else -1):
        values = [part for _, part in group]
        values = [jnp.concatenate(values)] if len(values) > 1 else values
        vector = lax.dynamic_update_slice(vector, *values, (start,))
        start += values[0].size
    return vector


def _trace_all_reduce(
    function: JaxFunction, operands: Sequence[Any], spec: AllReduceSpec, ffi_all_reduce: FfiAllReduce, iteration: Any
) -> tuple[list[Any], Any]:
    """Trace a function and the all-reduce of one of its results.

    The all-reduce of the last parameters' gradients starts while the gradients of earlier parameters are computed.

    Parameters
    ----------
    function : JaxFunction
    operands : list of jax.Array
    spec : AllReduceSpec
    ffi_all_reduce : FfiAllReduce
    iteration : jax.Array or None
        As in `FfiAllReduce.trace_finish`.

    Returns
    -------
    results : list of jax.Array
        The function's results, with the reduced value of ``spec.storage``.
    is_valid : jax.Array of int32
        As `FfiAllReduce.trace_finish` returns it.
    """
    import jax.numpy as jnp

    position = next(i for i, storage in enumerate(function.result_storages) if storage is spec.storage)
    evaluator = JaxprEvaluator(function.run, operands, function.n_outputs, position)
    parts = evaluator.parts
    own_dtype = parts[0].aval.dtype
    dtype = spec.wire_dtype if parts[0].aval.ndim == 1 else None
    n_tail = spec.n_tail if dtype is not None else 0
    chunks = [parts]
    if iteration is None:
        chunks = _group_into_chunks(parts, jnp.dtype(dtype or own_dtype).itemsize, n_tail)

    def compute_chunk(chunk: list[Any]) -> Any:
        """Return the values of a chunk without the tail, as one vector in the dtype in which it is sent."""
        values = evaluator.compute(chunk)
        if dtype is not None:
            values = _split_tail(values, n_tail)[0] if chunk is chunks[0] else values
            values = [(value / spec.divisor).astype(dtype) for value in values]
        return values[0] if len(values) == 1 else jnp.concatenate(values)

    started_arrays: list[Any] = []
    token: Any = None
    for chunk in chunks[:-1]:
        array, token = ffi_all_reduce.trace_start(compute_chunk(chunk), np.int32(0) if token is None else token)
        token = evaluator.delay_until(token)
        started_arrays.append(array)
    remaining_arrays = [compute_chunk(chunks[-1])]
    if dtype is not None:
        # The number of rows, and running averages, would lose too much precision in the wire dtype.
        tail_vectors = _split_tail(evaluator.compute(chunks[0]), n_tail)[1]
        remaining_arrays.append(jnp.concatenate(tail_vectors) / spec.divisor)
    arrays, is_valid = ffi_all_reduce.trace_finish(remaining_arrays, started_arrays, token, iteration)
    tail = [arrays.pop()] if dtype is not None else []
    arrays = [*[array.astype(own_dtype) for array in reversed(arrays)], *tail]
    return evaluator.finish(arrays[0] if len(arrays) == 1 else jnp.concatenate(arrays)), is_valid


def _group_into_chunks(parts: Sequence[Any], itemsize: int, n_tail: int = 0) -> list[list[Any]]:
    """Group consecutive parts of a vector into chunks, from the end of the vector to its start.

    Each chunk except the last has at least `MIN_CHUNK_BYTES`.  The first one has more than ``n_tail`` items.
    """
    chunks: list[list[Any]] = [[]]
    for part in reversed(parts):
        size = sum(member.aval.size for member in chunks[-1])
        if size * itemsize >= MIN_CHUNK_BYTES and (len(chunks) > 1 or size > n_tail):
            chunks.append([])
        chunks[-1].insert(0, part)
    return chunks


def _split_tail(vectors: Sequence[Any], n_tail: int) -> tuple[list[Any], list[Any]]:
    """Split consecutive vectors before their last ``n_tail`` items; return the vectors of both parts."""
    head = list(vectors)
    tail_vectors: list[Any] = []
    while n_tail > 0:
        vector = head.pop()
        tail_vectors.insert(0, vector[-n_tail:])
        if len(vector) > n_tail:
            head.append(vector[:-n_tail])
        n_tail -= len(vector)
    return head, tail_vectors


def trace_loop(
    compute_once: Callable[..., Any], n_repeats: int, n_inputs: int, changed_positions: Sequence[int], *arguments: Any
) -> tuple[Any, ...]:
    """Trace a loop over equal parts of the inputs.

    Parameters
    ----------
    compute_once : callable
        Takes inputs and the state; returns new values of the items at ``changed_positions`` of the state.
    n_repeats : int
    n_inputs : int
    changed_positions : list of int
        Positions in the state.
    *arguments : jax.Array
        The inputs, then the state.

    Returns
    -------
    tuple of jax.Array
        Final values of the items at ``changed_positions``.
    """
    from jax import lax

    parts = [a.reshape(n_repeats, a.shape[0] // n_repeats, *a.shape[1:]) for a in arguments[:n_inputs]]
    state = list(arguments[n_inputs:])

    def body(carry: list[Any], rows: list[Any]) -> tuple[list[Any], None]:
        for position, value in zip(changed_positions, carry, strict=True):
            state[position] = value
        new_state = list(compute_once(*rows, *state))
        for old_value, new_value in zip(carry, new_state, strict=True):
            if old_value.shape != new_value.shape:
                raise ValueError(
                    f"a shared variable of shape {old_value.shape} is updated by a value of shape {new_value.shape}, "
                    "which a launch that repeats the computation can't support"
                )
        return new_state, None

    final, _ = lax.scan(body, [state[position] for position in changed_positions], parts, length=n_repeats)
    return tuple(final)


def _keep_old_if_invalid(is_valid: Any, new_value: Any, old_value: Any) -> Any:
    """Return a variable's new value if the reduction is valid, else the old value.

    If their shapes differ, return the new value: the shape of a traced result can't depend on ``is_valid``.
    """
    import jax.numpy as jnp

    can_choose = new_value is not old_value and new_value.shape == old_value.shape
    return jnp.where(is_valid != 0, new_value, old_value) if can_choose else new_value
