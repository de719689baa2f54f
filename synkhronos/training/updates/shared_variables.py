"""Shared variables in the likeness of a parameter: the state of an update rule."""

from __future__ import annotations

import numpy as np

from synkhronos.variable_types import Array, SharedVariable


def make_zero_state(param: SharedVariable, name: str) -> SharedVariable:
    """Make a shared variable of zeros, with the dtype, shape, broadcast pattern and device of `param`."""
    zeros, dtype = np.zeros(get_shape(param), param.dtype), str(param.dtype)
    return make_shared_like(param, zeros, dtype, f"{param.name or 'param'}_{name}")


def make_shared_like(param: SharedVariable, value: Array, dtype: str, name: str | None) -> SharedVariable:
    """Make a shared variable with the broadcast pattern and device of `param`."""
    # The constructor and the type are used, since `shared` has another name for the pattern in each library.
    return type(param)(type=param.type.clone(dtype=dtype), value=np.asarray(value, dtype), strict=False, name=name)


def get_shape(param: SharedVariable) -> tuple[int, ...]:
    """Return the shape of a shared variable's value."""
    # The value is read as its internal type, as another type would copy a whole array from a GPU.
    return tuple(int(length) for length in param.get_value(borrow=True, return_internal_type=True).shape)
