"""Random generators in JAX mode: the keys that compiled functions draw from.

A shared variable holds a NumPy Generator.  PyTensor gives each compiled function a dict with a JAX key made from the
generator.  Two functions with one generator would then draw equal numbers.  Here, all functions with a generator share
one storage of its key::

    container of the shared variable         key storage
    [Generator]                              [key]   <- drawn from and replaced by every launch
        |                                       |
        +---- update_key: key of Generator ---->+
        +<--- move_to_key_position -------------+

PyTensor makes a key of the lower 64 bits of PCG64's state.  From the key, a copy of the generator can therefore be
moved to the same position in the stream.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from synkhronos.containers import WeakKeyDict

#: Name of the JAX key in the dict that PyTensor makes of a random generator.
JAX_KEY = "jax_state"

#: Generator and key storage, by container.  An entry is outdated if the container has another generator.
_key_storages: WeakKeyDict[Any, tuple[np.random.Generator, Any]] = WeakKeyDict()


def share_key_storage(container: Any, storage: list[Any]) -> list[Any]:
    """Return the storage that a function reads an input from: for a random generator, the key that functions share.

    ``container`` is the shared variable's.  ``storage`` is the function's: a list with one item, which is a dict if the
    input is a random generator.  Any other storage is returned unchanged.
    """
    if not isinstance(storage[0], dict):
        return storage
    generator = container.storage[0]
    entry = _key_storages.get(container)
    if entry is None or entry[0] is not generator:
        entry = _key_storages[container] = generator, [np.array(storage[0][JAX_KEY])]
    return entry[1]


class _UserFunctionKeys:
    """Key storage that reads and writes the key in the dicts of all functions that the user compiled."""

    def __init__(self) -> None:
        self.storages: list[list[Any]] = []

    def __getitem__(self, index: int) -> Any:
        return np.asarray(self.storages[0][0][JAX_KEY])

    def __setitem__(self, index: int, key: Any) -> None:
        for storage in self.storages:
            storage[0] = {**storage[0], JAX_KEY: key}


def track_user_function(function: Any) -> None:
    """Record the key storages of a function that the user compiled, for `move_to_key_position` and `update_key`."""
    for spec, storage in zip(function.maker.expanded_inputs, function.vm.inputs, strict=True):
        if isinstance(storage[0], dict):
            entry = _key_storages.get(spec.value)
            keys = entry[1] if entry is not None else None
            if not isinstance(keys, _UserFunctionKeys):
                keys = _UserFunctionKeys()
                _key_storages[spec.value] = spec.value.storage[0], keys
            if not any(storage is tracked for tracked in keys.storages):
                keys.storages.append(storage)


def check_key_generator(container: Any, generator: np.random.Generator) -> None:
    """Raise TypeError if functions draw from the container's key and PyTensor can't make a key of the generator."""
    supported = np.random.PCG64 | np.random.PCG64DXSM
    if _key_storages.get(container) is not None and not isinstance(generator.bit_generator, supported):
        raise TypeError(
            f"in JAX mode the bit generator has to be PCG64 or PCG64DXSM, got {type(generator.bit_generator).__name__}"
        )


def move_to_key_position(container: Any, generator: np.random.Generator) -> np.random.Generator:
    """Move a copy of the container's generator to the position of the key, and return it.

    The copy is not moved if no function has drawn from the key, or if the user has set another generator since.
    """
    entry = _key_storages.get(container)
    if entry is None or entry[0] is not container.storage[0]:
        return generator
    state: Any = generator.bit_generator.state
    low, high = (int(word) for word in np.asarray(entry[1][0]))
    state["state"]["state"] = state["state"]["state"] >> 64 << 64 | high << 32 | low
    generator.bit_generator.state = state
    return generator


def update_key(container: Any) -> None:
    """Set the key that functions draw from, if there is one, to the key of the container's generator."""
    entry = _key_storages.get(container)
    if entry is not None:
        from pytensor.link.jax.dispatch import jax_typify  # not at the top: JAX is optional

        generator = container.storage[0]
        entry[1][0] = np.array(jax_typify(generator)[JAX_KEY])
        _key_storages[container] = generator, entry[1]
