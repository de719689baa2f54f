"""Random generators in JAX mode: the keys that compiled functions draw from.

A shared variable holds a NumPy Generator.  PyTensor gives each compiled function a dict with a JAX key that was made
from it, so that two functions of one generator would draw the same numbers.  Here, all functions of a generator have
one storage for its key::

    container of the shared variable         key storage
    [Generator]                              [key]   <- drawn from and replaced by every launch
        |                                       |
        +---- update_key: key of Generator ---->+
        +<--- add_position: Generator at key ---+

PyTensor makes a key of the lower 64 bits of PCG64's state, so that the position of a key in its stream can be written
back into a copy of the generator.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from synkhronos.ranks import WeakKeyDict

#: Entry of the dict that PyTensor makes of a random generator: the key that JAX draws from.
KEY = "jax_state"

#: Generator and key storage by container.  An entry is outdated if the container holds another generator.
_streams: WeakKeyDict[Any, tuple[np.random.Generator, Any]] = WeakKeyDict()


def share_key_storage(container: Any, storage: list[Any]) -> list[Any]:
    """Return the storage of a function's input; for a random generator the key storage that all functions share.

    Parameters
    ----------
    container : Container
        Container of the shared variable.
    storage : list
        The function's own storage of this input: a list of one, with a dict if it is a random generator.
    """
    if not isinstance(storage[0], dict):
        return storage
    generator = container.storage[0]
    stream = _streams.get(container)
    if stream is None or stream[0] is not generator:
        stream = _streams[container] = generator, [np.array(storage[0][KEY])]
    return stream[1]


class _UserFunctionKeys:
    """Key storage of a generator in functions that the user compiled: PyTensor keeps a dict in each of them.

    Like a list of one key; all dicts are updated together.
    """

    def __init__(self) -> None:
        self.storages: list[list[Any]] = []

    def __getitem__(self, index: int) -> Any:
        return np.asarray(self.storages[0][0][KEY])

    def __setitem__(self, index: int, key: Any) -> None:
        for storage in self.storages:
            storage[0] = {**storage[0], KEY: key}


def track_function(function: Any) -> None:
    """Use the keys of a function that the user compiled in JAX mode for `add_position` and `update_key`."""
    for spec, storage in zip(function.maker.expanded_inputs, function.vm.inputs, strict=True):
        if isinstance(storage[0], dict):
            stream = _streams.get(spec.value)
            keys = stream[1] if stream is not None else None
            if not isinstance(keys, _UserFunctionKeys):
                keys = _UserFunctionKeys()
                _streams[spec.value] = spec.value.storage[0], keys
            if not any(storage is tracked for tracked in keys.storages):
                keys.storages.append(storage)


def check_generator(container: Any, generator: np.random.Generator) -> None:
    """Raise TypeError if functions draw from the container's key, and PyTensor can't make a key of the generator."""
    supported = np.random.PCG64 | np.random.PCG64DXSM
    if _streams.get(container) is not None and not isinstance(generator.bit_generator, supported):
        raise TypeError(f"in JAX mode PyTensor takes PCG64's numbers, got {type(generator.bit_generator).__name__}'s")


def add_position(container: Any, generator: np.random.Generator) -> np.random.Generator:
    """Move a copy of the container's generator to the position of the key, and return it.

    It is returned unchanged if no function has drawn from the key, or if the user has set another generator since.
    """
    stream = _streams.get(container)
    if stream is None or stream[0] is not container.storage[0]:
        return generator
    state: Any = generator.bit_generator.state
    low, high = (int(word) for word in np.asarray(stream[1][0]))
    state["state"]["state"] = state["state"]["state"] >> 64 << 64 | high << 32 | low
    generator.bit_generator.state = state
    return generator


def update_key(container: Any) -> None:
    """Replace the key by that of the generator in the container, if functions draw from one."""
    stream = _streams.get(container)
    if stream is not None:
        from pytensor.link.jax.dispatch import jax_typify  # not at the top: JAX is optional

        generator = container.storage[0]
        stream[1][0] = np.array(jax_typify(generator)[KEY])
        _streams[container] = generator, stream[1]
