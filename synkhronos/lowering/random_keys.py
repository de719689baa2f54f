"""Random generators in JAX mode: the keys that compiled functions draw from.

A shared variable holds a NumPy Generator.  PyTensor gives each compiled function a dict with a JAX key made from the
generator.  Two functions with one generator would then draw equal numbers.  Here, all functions with a generator share
one storage of its key::

    container of the shared variable         KeyStorage
    [Generator]                              [key]   <- drawn from and replaced by every launch
        |                                       |
        +---- key of another Generator -------->+
        +<--- move_to_key_position -------------+

The key is made again if the container has another generator, which `set_value` or a new seed has put there.
PyTensor makes a key of the lower 64 bits of PCG64's state.  From the key, a copy of the generator can therefore be
moved to the same position in the stream.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from synkhronos.containers import WeakKeyDict

#: Name of the JAX key in the dict that PyTensor makes of a random generator.
JAX_KEY = "jax_state"


class KeyStorage:
    """Storage of the key that all functions with a generator share: its item 0.

    Attributes
    ----------
    generator : numpy.random.Generator or None
        The generator whose key it is; None before the key is first read.
    user_storages : list of list
        Inputs of functions that the user compiled without Synkhronos.  They have the key in dicts of their own.
    """

    def __init__(self, container: Any):
        self._generator_storage = container.storage
        self.generator: np.random.Generator | None = None
        self.user_storages: list[list[dict[str, Any]]] = []
        self._key: Any = None

    def __getitem__(self, index: int) -> Any:
        if self.generator is not self._generator_storage[0]:
            self.update()
        return np.asarray(self.user_storages[0][0][JAX_KEY]) if self.user_storages else self._key

    def __setitem__(self, index: int, key: Any) -> None:
        self._key = key
        for storage in self.user_storages:
            storage[0] = {**storage[0], JAX_KEY: key}

    def update(self) -> None:
        """Set the key to that of the container's generator."""
        from pytensor.link.jax.dispatch import jax_typify  # not at the top: JAX is optional

        self.generator = self._generator_storage[0]
        self[0] = np.array(jax_typify(self.generator)[JAX_KEY])


#: Key storage by container.
_key_storages: WeakKeyDict[Any, KeyStorage] = WeakKeyDict()


def get_key_storage(container: Any) -> KeyStorage:
    """Return the key storage of a shared variable, given by its container."""
    storage = _key_storages.get(container)
    if storage is None:
        storage = _key_storages[container] = KeyStorage(container)
    return storage


def share_key_storage(container: Any, copied_container: Any) -> None:
    """Give PyTensor's copy of a random generator the key storage of the original."""
    _key_storages[copied_container] = get_key_storage(container)


def track_user_function(function: Any) -> None:
    """Record the keys of a function that the user compiled, for `move_to_key_position` and `update_key`."""
    for spec, storage in zip(function.maker.expanded_inputs, function.vm.inputs, strict=True):
        if isinstance(storage[0], dict):
            keys = get_key_storage(spec.value)
            keys.generator = spec.value.storage[0]
            if not any(storage is tracked for tracked in keys.user_storages):
                keys.user_storages.append(storage)


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
    if entry is None or entry.generator is not container.storage[0]:
        return generator
    state: Any = generator.bit_generator.state
    low, high = (int(word) for word in np.asarray(entry[0]))
    state["state"]["state"] = state["state"]["state"] >> 64 << 64 | high << 32 | low
    generator.bit_generator.state = state
    return generator


def update_key(container: Any) -> None:
    """Set the key that functions draw from, if there is one, to the key of the container's generator."""
    entry = _key_storages.get(container)
    if entry is not None:
        entry.update()
