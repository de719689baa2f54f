"""Values of shared variables with a method ``sync``: scripts for Theano call it to wait for a GPU.

The call is ``shared.container.value.sync()``.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np

from synkhronos.lowering import random_keys


class SyncedArray(np.ndarray):
    """A view of a shared variable's array in host memory."""

    def sync(self) -> None:
        """Do nothing: a NumPy array is always complete."""

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = (), **kwargs: Any) -> Any:
        """Compute with plain arrays, and return plain arrays."""
        if out:
            kwargs["out"] = tuple(map(_to_plain_array, out))
        return getattr(ufunc, method)(*map(_to_plain_array, inputs), **kwargs)


class SyncedValue(np.lib.mixins.NDArrayOperatorsMixin):
    """A shared variable's JAX array with a method ``sync``.  Operators compute with NumPy."""

    def __init__(self, value: Any):
        self._value = value

    def __getattr__(self, name: str) -> Any:
        return getattr(self._value, name)

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
        return np.asarray(self._value, *args, **kwargs)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        """Compute with NumPy arrays."""
        return getattr(ufunc, method)(*map(_to_plain_array, inputs), **kwargs)

    def __getitem__(self, index: Any) -> Any:
        return np.asarray(self._value)[index]

    def __len__(self) -> int:
        return len(self._value)

    def __bool__(self) -> bool:
        return bool(self._value)

    def __int__(self) -> int:
        return int(self._value)

    def __float__(self) -> float:
        return float(self._value)

    def sync(self) -> None:
        """Wait until the value has been computed."""
        self._value.block_until_ready()


def get_synced_value(container: Any) -> Any:
    """Return a container's value with a method ``sync``."""
    value = container.data
    if type(value) is np.ndarray:
        return value.view(SyncedArray)
    return SyncedValue(value) if hasattr(value, "block_until_ready") else value


def set_synced_value(container: Any, value: Any) -> None:
    """Set a container's value, which may have a method ``sync``."""
    container.data = _to_plain_array(value)


def _to_plain_array(value: Any) -> Any:
    return np.asarray(value) if isinstance(value, SyncedArray | SyncedValue) else value


def get_value(self: Any, borrow: bool = False, return_internal_type: bool = False) -> Any:
    """Return a shared variable's value without a method ``sync``.

    A JAX array becomes a NumPy array, unless the internal type is requested.  A random generator has the state from
    which functions draw next.
    """
    value = self.container.data
    if isinstance(value, np.random.Generator):
        return random_keys.move_to_key_position(self.container, copy.deepcopy(value))
    if type(value).__module__.startswith("jax") and not return_internal_type:
        return np.array(value)
    return value if borrow else copy.deepcopy(value)


def add_sync_method(container_class: Any, shared_class: Any) -> None:
    """Patch a library's classes: a container's ``value`` gets a method ``sync``, ``get_value`` returns plain values."""
    if container_class.value.fget is not get_synced_value:
        container_class.value = property(get_synced_value, set_synced_value)
        shared_class.get_value = get_value
