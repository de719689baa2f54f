"""PyTensor, 3.0 or newer."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor
from pytensor.compile import In, Out, SharedVariable
from pytensor.compile.mode import get_mode
from pytensor.graph.basic import Constant, Variable
from pytensor.graph.replace import clone_replace
from pytensor.link.basic import PerformLinker
from pytensor.link.c.cmodule import KeyData
from pytensor.link.jax.linker import JAXLinker
from pytensor.link.numba.linker import NumbaLinker

from synkhronos.devices import JAX, Device
from synkhronos.graphs.family import AT_FIRST_CALL, AT_ONCE, IN_TURN, GraphLibrary, check_jumps, write_keys_at_once
from synkhronos.lowering import random_keys, sums  # noqa: F401 - sums bounds a rewrite
from synkhronos.lowering.linker import use_length_linker


class PyTensor(GraphLibrary):
    """PyTensor."""

    tensor = pytensor.tensor
    variable_class = Variable
    shared_class = SharedVariable
    constant_class = Constant
    input_class = In
    output_class = Out

    def is_generator(self, shared: Any) -> bool:
        """Whether the variable holds a NumPy Generator."""
        return isinstance(self.get(shared), np.random.Generator)

    def check_stream(self, shared: Any, value: Any, moves: bool) -> None:
        """Refuse what is no Generator, and bit generators without jumps."""
        if not isinstance(value, np.random.Generator):
            raise TypeError(f"expected a numpy.random.Generator, such as default_rng(seed), got {value!r}")
        if moves:
            check_jumps(value.bit_generator)
        random_keys.check_generator(shared.container, value)

    def stream(self, shared: Any) -> Any:
        """Return a Generator: in JAX mode the one from which PyTensor would make the present key."""
        return random_keys.add_position(shared.container, super().stream(shared))

    def follow_streams(self, function: Any) -> None:
        """In JAX mode PyTensor has given it a copy of each generator."""
        if isinstance(function.maker.linker, JAXLinker):
            random_keys.track_function(function)

    def set_stream(self, shared: Any, value: Any) -> None:
        """Put a Generator into the container, and in JAX mode its key where functions find it."""
        super().set_stream(shared, value)
        random_keys.update_key(shared.container)

    def moved(self, value: Any, distance: int) -> Any:
        """Jump a Generator."""
        return type(value)(value.bit_generator.jumped(distance))

    def default(self, wrapped: Any) -> tuple[Any, ...]:
        """Return the default value of `synkhronos.compat`'s ``In``; PyTensor's own has none."""
        return tuple(getattr(wrapped, "default", ()))

    def clone(self, outputs: Sequence[Any], replace: dict[Any, Any]) -> list[Any]:
        """Return copies of the outputs' graphs with variables replaced."""
        return list(clone_replace(list(outputs), replace, rebuild_strict=False))

    def uses_xla(self, mode: Any) -> bool:
        """JAX mode does."""
        return isinstance(get_mode(mode).linker, JAXLinker)

    def function(self, inputs: Sequence[Any], outputs: Any = None, **kwargs: Any) -> Any:
        """Compile; in JAX mode lengths may follow from integer inputs."""
        return super().function(inputs, outputs, **{**kwargs, "mode": use_length_linker(kwargs.get("mode"))})

    def compiles(self, mode: Any) -> str:
        """Python's linkers and JAX leave nothing on disk, Numba what it makes when a function is called."""
        linker = get_mode(mode).linker
        if isinstance(linker, NumbaLinker):
            return AT_FIRST_CALL if pytensor.config.numba__cache else AT_ONCE
        return AT_ONCE if isinstance(linker, JAXLinker | PerformLinker) else IN_TURN

    def leaves_on_disk(self, function: Any) -> bool:
        """Numba leaves nothing of a graph with an Op that PyTensor has no key for, such as a call back to Python."""
        return function.vm.jit_fn.stats.cache_path is not None

    def compile_now(self, function: Any) -> None:
        """Call what Numba makes on copies of the values, and forget the results."""
        function.vm.jit_fn(*[copy.deepcopy(storage[0]) for storage in function.vm.inputs])

    def default_mode(self, device: Device) -> Any:
        """JAX mode, where arrays are JAX's."""
        return "JAX" if device is JAX else super().default_mode(device)

    def fixed_shape(self, variable: Any) -> tuple[int | None, ...]:
        """Return the static shape."""
        return tuple(variable.type.shape)


write_keys_at_once(KeyData)
LIBRARY = PyTensor(pytensor)
