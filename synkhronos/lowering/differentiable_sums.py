"""Sums of functions as functions of JAX arrays, with JAX's derivative.

Value and gradients are computed at once, before the derivative is asked for, so that they need one all-reduce, or one
call of Python.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

#: Takes parameters; returns a scalar, or its value and gradients.
Sum = Callable[..., Any]


def join_sums(
    functions: Sequence[Sum],
    counts: Sequence[int],
    floats: Sequence[Sequence[int]],
    all_reduce: Callable[[Any], Any],
) -> Callable[..., Any]:
    """Return a function that computes several sums on each rank and reduces all of them at once.

    Parameters
    ----------
    functions : list of callable
        Each takes parameters and returns this rank's part of a sum.
    counts : list of int
        Number of parameters of each.
    floats : list of list of int
        Positions of the parameters that each can be differentiated by.
    all_reduce : callable
        Takes a vector; returns its sum over the ranks.

    Returns
    -------
    callable
        Takes the parameters of all functions, one after the other; returns the sum, or a tuple of sums.
    """
    import jax
    import jax.numpy as jnp

    starts = np.cumsum([0, *counts])

    def split(params: Sequence[Any]) -> list[Sequence[Any]]:
        return [params[start : start + count] for start, count in zip(starts, counts, strict=False)]

    def reduce_all(values: Sequence[Any]) -> list[Any]:
        dtype = jnp.result_type(*values)
        vector = all_reduce(jnp.concatenate([jnp.ravel(value).astype(dtype) for value in values]))
        parts = jnp.split(vector, np.cumsum([value.size for value in values])[:-1].tolist())
        return [part.reshape(v.shape).astype(v.dtype) for part, v in zip(parts, values, strict=True)]

    def to_result(values: Sequence[Any]) -> Any:
        return values[0] if len(values) == 1 else tuple(values)

    @jax.custom_vjp
    def compute(*params: Any) -> Any:
        return to_result(reduce_all([f(*own) for f, own in zip(functions, split(params), strict=True)]))

    def forward(*params: Any) -> tuple[Any, Any]:
        values: list[Any] = []
        gradients: list[Any] = []
        for f, own, positions in zip(functions, split(params), floats, strict=True):
            value, own_gradients = f(*own), ()
            if positions:
                value, own_gradients = jax.value_and_grad(f, argnums=tuple(positions))(*own)
            values.append(value)
            gradients.extend(own_gradients)
        reduced = reduce_all([*values, *gradients])
        return to_result(reduced[: len(values)]), (reduced[len(values) :], params)

    def backward(residuals: Any, cotangents: Any) -> tuple[Any, ...]:
        gradients, params = iter(residuals[0]), residuals[1]
        cotangents = (cotangents,) if len(functions) == 1 else cotangents
        result: list[Any] = []
        for own, positions, cotangent in zip(split(params), floats, cotangents, strict=True):
            result += [
                cotangent * next(gradients) if i in positions else _make_zero_cotangent(p) for i, p in enumerate(own)
            ]
        return tuple(result)

    compute.defvjp(forward, backward)
    return lambda *params: compute(*map(jnp.asarray, params))


def call_python(value: Sum, value_and_gradients: Sum, dtype: str, floats: Sequence[int]) -> Callable[..., Any]:
    """Return a function of JAX arrays that computes a sum by functions of NumPy arrays.

    Parameters
    ----------
    value : callable
        Takes a list of arrays; returns the sum.
    value_and_gradients : callable
        Takes a list of arrays; returns a list of the sum and its gradients.
    dtype : str
        Dtype of the sum.
    floats : list of int
        Positions of the parameters with a gradient.
    """
    import jax
    import jax.numpy as jnp

    total = jax.ShapeDtypeStruct((), dtype)

    # Within callbacks, JAX computes on the CPU: a GPU would compute nothing else until the callback has returned.
    def to_host(params: Sequence[Any]) -> list[np.ndarray]:
        return [np.asarray(param) for param in params]

    @jax.custom_vjp
    def compute(*params: Any) -> Any:
        return jax.pure_callback(lambda *p: value(to_host(p)), total, *params, vmap_method="sequential")

    def forward(*params: Any) -> tuple[Any, Any]:
        likes = [total, *(jax.ShapeDtypeStruct(params[i].shape, params[i].dtype) for i in floats)]
        result, *gradients = jax.pure_callback(
            lambda *p: value_and_gradients(to_host(p)), likes, *params, vmap_method="sequential"
        )
        return result, (gradients, params)

    def backward(residuals: Any, cotangent: Any) -> tuple[Any, ...]:
        gradients, params = residuals
        by_position = dict(zip(floats, gradients, strict=True))
        return tuple(
            cotangent * by_position[i] if i in by_position else _make_zero_cotangent(p) for i, p in enumerate(params)
        )

    compute.defvjp(forward, backward)
    return lambda *params: compute(*map(jnp.asarray, params))


def _make_zero_cotangent(param: Any) -> Any:
    """Return the cotangent of a parameter that is not differentiated."""
    import jax

    return np.zeros(np.shape(param), jax.dtypes.float0)
