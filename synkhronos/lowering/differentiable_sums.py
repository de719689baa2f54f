"""Sums of functions, as functions of JAX arrays that JAX can differentiate.

Value and gradients are computed together in the forward pass, so that they need one all-reduce, or one call of Python.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from synkhronos.variable_types import Array

#: Function of parameters that returns a scalar, or a scalar and its gradients.
SumFunction = Callable[..., Any]


def fuse_sums(
    functions: Sequence[SumFunction],
    n_params: Sequence[int],
    differentiable_positions: Sequence[Sequence[int]],
    all_reduce: Callable[[Any], Any],
) -> Callable[..., Any]:
    """Return a function that computes several sums on each rank, and reduces them by one all-reduce.

    The returned function takes the parameters of all functions, in order, and returns the sum, or a tuple of sums.
    Each of ``functions`` takes ``n_params`` of them, and returns this rank's share of a sum, a scalar.  The share is
    differentiable with respect to the parameters at its ``differentiable_positions``.  ``all_reduce`` takes a vector,
    and returns its sum over the ranks.
    """
    import jax
    import jax.numpy as jnp

    starts = np.cumsum([0, *n_params])

    def split(params: Sequence[Array]) -> list[Sequence[Any]]:
        return [params[start : start + count] for start, count in zip(starts, n_params, strict=False)]

    def reduce_all(values: Sequence[Any]) -> list[Any]:
        dtype = jnp.result_type(*values)
        vector = all_reduce(jnp.concatenate([jnp.ravel(value).astype(dtype) for value in values]))
        parts = jnp.split(vector, np.cumsum([value.size for value in values])[:-1].tolist())
        return [part.reshape(v.shape).astype(v.dtype) for part, v in zip(parts, values, strict=True)]

    def to_result(values: Sequence[Any]) -> Any:
        return values[0] if len(values) == 1 else tuple(values)

    @jax.custom_vjp
    def compute(*params: Any) -> Any:
        return to_result(reduce_all([f(*own_params) for f, own_params in zip(functions, split(params), strict=True)]))

    def forward(*params: Any) -> tuple[Any, Any]:
        values: list[Any] = []
        gradients: list[Any] = []
        for f, own_params, positions in zip(functions, split(params), differentiable_positions, strict=True):
            value, own_gradients = f(*own_params), ()
            if positions:
                value, own_gradients = jax.value_and_grad(f, argnums=tuple(positions))(*own_params)
            values.append(value)
            gradients.extend(own_gradients)
        reduced = reduce_all([*values, *gradients])
        return to_result(reduced[: len(values)]), (reduced[len(values) :], params)

    def backward(residuals: Any, cotangents: Any) -> tuple[Any, ...]:
        gradients, params = iter(residuals[0]), residuals[1]
        cotangents = (cotangents,) if len(functions) == 1 else cotangents
        result: list[Any] = []
        for own_params, positions, cotangent in zip(split(params), differentiable_positions, cotangents, strict=True):
            result += [
                cotangent * next(gradients) if i in positions else _make_zero_cotangent(p)
                for i, p in enumerate(own_params)
            ]
        return tuple(result)

    compute.defvjp(forward, backward)
    return lambda *params: compute(*map(jnp.asarray, params))


def make_callback_sum(
    compute_value: SumFunction,
    compute_value_and_gradients: SumFunction,
    dtype: str,
    differentiable_positions: Sequence[int],
) -> Callable[..., Any]:
    """Return a differentiable function of JAX arrays that computes a sum by a callback to functions of NumPy arrays.

    ``compute_value`` takes a list of arrays, and returns the sum; ``compute_value_and_gradients`` returns a list of the
    sum and its gradients with respect to the parameters at ``differentiable_positions``.  ``dtype`` is that of the sum.
    """
    import jax
    import jax.numpy as jnp

    total = jax.ShapeDtypeStruct((), dtype)

    # NumPy arrays, so that callbacks compute on the CPU: a GPU is blocked until the callback has returned.
    def to_numpy(params: Sequence[Array]) -> list[np.ndarray]:
        return [np.asarray(param) for param in params]

    @jax.custom_vjp
    def compute(*params: Any) -> Any:
        return jax.pure_callback(lambda *p: compute_value(to_numpy(p)), total, *params, vmap_method="sequential")

    def forward(*params: Any) -> tuple[Any, Any]:
        result_specs = [
            total,
            *(jax.ShapeDtypeStruct(params[i].shape, params[i].dtype) for i in differentiable_positions),
        ]
        result, *gradients = jax.pure_callback(
            lambda *p: compute_value_and_gradients(to_numpy(p)), result_specs, *params, vmap_method="sequential"
        )
        return result, (gradients, params)

    def backward(residuals: Any, cotangent: Any) -> tuple[Any, ...]:
        gradients, params = residuals
        by_position = dict(zip(differentiable_positions, gradients, strict=True))
        return tuple(
            cotangent * by_position[i] if i in by_position else _make_zero_cotangent(p) for i, p in enumerate(params)
        )

    compute.defvjp(forward, backward)
    return lambda *params: compute(*map(jnp.asarray, params))


def _make_zero_cotangent(param: Array) -> Any:
    """Return the zero cotangent of a parameter that is not differentiable."""
    import jax

    return np.zeros(np.shape(param), jax.dtypes.float0)
