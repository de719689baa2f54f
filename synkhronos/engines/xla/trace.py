"""The JAX function of an `Executable`: its PyTensor functions, the exchange after the first one, and a loop.

JAX traces the functions here, so their arrays are traced ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

from synkhronos.devices.jax.ffi_collectives import FfiCollectives
from synkhronos.devices.jax.scalar_log import ScalarLog
from synkhronos.engines.xla.traced_exchange import ExchangeSpec, TracedExchange, TracedShardedExchange
from synkhronos.engines.xla.vector_parts import trace_in_place
from synkhronos.lowering.jax_function import JaxFunction


def trace_functions(
    functions: Sequence[JaxFunction],
    exchange_spec: ExchangeSpec | None,
    ffi_collectives: FfiCollectives | None,
    storages: Sequence[list[Any]],
    updated_storages: Sequence[list[Any]],
    logged_positions: Sequence[int],
    is_in_loop: bool,
    lengths: tuple[int, ...],
    *arguments: Any,
) -> tuple[Any, ...]:
    """Trace the functions and the exchange that follows the first one, as in `Executable`.

    ``storages`` are those of all shared variables.  ``lengths`` are arguments of each function, after its inputs and
    shared variables.  ``arguments`` are the other results of `Executable._get_arguments`.  Return the outputs that are
    not at ``logged_positions``, the new values of ``updated_storages``, and the log with the other outputs appended.
    """
    n_inputs = sum(function.n_inputs for function in functions)
    n_arguments = n_inputs + len(storages)
    inputs = iter(arguments[:n_inputs])
    logs = arguments[n_arguments:]
    old_values = {id(s): a for s, a in zip(storages, arguments[n_inputs:n_arguments], strict=True)}
    values = dict(old_values)
    outputs: list[Any] = []
    exchange: TracedExchange | None = None
    if exchange_spec is not None and ffi_collectives is not None:
        exchange_class = TracedExchange if exchange_spec.shards is None else TracedShardedExchange
        iterations = logs[:1] if is_in_loop else ()  # a number that differs in each iteration
        exchange = exchange_class(exchange_spec, ffi_collectives, iterations)
    for function in functions:
        operands = [*islice(inputs, function.n_inputs), *[values[id(s)] for s in function.storages], *lengths]
        trace = trace_in_place if exchange is None else exchange.trace_function
        try:
            results = trace(function, operands)
        except Exception:
            function.raise_with_output_node()
            raise
        outputs += results[: function.n_outputs]
        for storage, result in zip(
            function.result_storages[function.n_outputs :], results[function.n_outputs :], strict=True
        ):
            values[id(storage)] = result
    if exchange is not None:
        values = {key: exchange.keep_old_if_invalid(key, value, old_values[key]) for key, value in values.items()}
    # Logged outputs are not returned: each would be a new array at a new address.
    unlogged = [output for i, output in enumerate(outputs) if i not in logged_positions]
    new_logs = ScalarLog.trace_append(logs, [outputs[i] for i in logged_positions]) if logs else []
    return (*unlogged, *(values[id(storage)] for storage in updated_storages), *new_logs)


def trace_loop(
    compute_once: Callable[..., Any], n_repeats: int, n_inputs: int, updated_positions: Sequence[int], *arguments: Any
) -> tuple[Any, ...]:
    """Trace a loop over ``n_repeats`` equal parts of the inputs.  Return the final values at ``updated_positions``.

    ``arguments`` are the inputs, then the state.  ``compute_once`` takes inputs and the state, and returns new values
    of the items at ``updated_positions`` of the state.
    """
    from jax import lax

    parts = [a.reshape(n_repeats, a.shape[0] // n_repeats, *a.shape[1:]) for a in arguments[:n_inputs]]
    state = list(arguments[n_inputs:])

    def body(carry: list[Any], rows: list[Any]) -> tuple[list[Any], None]:
        for position, value in zip(updated_positions, carry, strict=True):
            state[position] = value
        new_state = list(compute_once(*rows, *state))
        for old_value, new_value in zip(carry, new_state, strict=True):
            if old_value.shape != new_value.shape:
                raise ValueError(
                    f"a shared variable of shape {old_value.shape} is updated by a value of shape {new_value.shape}, "
                    "which a launch that repeats the computation can't support"
                )
        return new_state, None

    final, _ = lax.scan(body, [state[position] for position in updated_positions], parts, length=n_repeats)
    return tuple(final)
