"""PyTensor 3.0 or newer, as a `GraphLibrary`.

Overrides are for JAX mode (keys of random generators, lengths as inputs) and Numba (compilation at the first call).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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

from synkhronos.graph_libraries.library import CompileOrder, GraphLibrary, make_key_files_atomic
from synkhronos.lowering import bounded_canonizer, random_keys  # noqa: F401 - the first changes a rewrite
from synkhronos.lowering.linker import StaticLengthLinker, with_static_length_linker
from synkhronos.variable_types import CompiledFunction, Mode


class PyTensor(GraphLibrary):
    """The graph library PyTensor."""

    tensor = pytensor.tensor
    variable_class = Variable
    shared_class = SharedVariable
    constant_class = Constant
    input_class = In
    output_class = Out

    def _list_config_variables(self) -> Iterator[tuple[Any, str, bool]]:
        return ((v, v.name, v.mutable) for v in pytensor.config._config_var_dict.values())

    def is_generator(self, shared: SharedVariable) -> bool:
        """Whether the variable holds a NumPy Generator."""
        return isinstance(self.borrow_value(shared), np.random.Generator)

    def check_generator(self, shared: SharedVariable, generator: Any, must_jump: bool) -> None:
        """Raise TypeError if the value is not a Generator, or has to jump and can't."""
        if not isinstance(generator, np.random.Generator):
            raise TypeError(f"expected a numpy.random.Generator, such as default_rng(seed), got {generator!r}")
        if must_jump and not hasattr(generator.bit_generator, "jumped"):
            raise TypeError(
                f"random numbers of {type(generator.bit_generator).__name__} can't differ between ranks: it has no "
                "method jumped; use numpy.random.PCG64 (the default), Philox or MT19937"
            )
        random_keys.check_key_generator(shared.container, generator)

    def copy_generator(self, shared: SharedVariable) -> Any:
        """Return a copy of a Generator; in JAX mode at the position of its key."""
        return random_keys.move_to_key_position(shared.container, super().copy_generator(shared))

    def track_generators(self, function: CompiledFunction) -> None:
        """Track the keys in a function of PyTensor's JAX mode, for which PyTensor has copied each generator."""
        linker = function.maker.linker
        if isinstance(linker, JAXLinker) and not isinstance(linker, StaticLengthLinker):
            random_keys.track_user_function(function)

    def set_generator(self, shared: SharedVariable, generator: Any) -> None:
        """Put a Generator into the container, and in JAX mode update the key that functions draw from."""
        super().set_generator(shared, generator)
        random_keys.update_key(shared.container)

    def jump_generator(self, generator: Any, n_jumps: int) -> Any:
        """Return a Generator ahead in the stream."""
        return type(generator)(generator.bit_generator.jumped(n_jumps))

    def _get_default_tuple(self, library_input: Any) -> tuple[Any, ...]:
        """Return a tuple with the default value of `synkhronos.compat`'s ``In``; PyTensor's own has none."""
        return tuple(getattr(library_input, "default_list", ()))

    def clone(self, outputs: Sequence[Any], replace: dict[Any, Any]) -> list[Variable]:
        """Return copies of the outputs' graphs with variables replaced."""
        return list(clone_replace(list(outputs), replace, rebuild_strict=False))

    def is_xla_mode(self, mode: Mode) -> bool:
        """Whether the mode is JAX mode."""
        return isinstance(get_mode(mode).linker, JAXLinker)

    def function(self, inputs: Sequence[Any], outputs: Any = None, **kwargs: Any) -> CompiledFunction:
        """Compile a function; in JAX mode, lengths may depend on integer inputs."""
        return super().function(inputs, outputs, **{**kwargs, "mode": with_static_length_linker(kwargs.get("mode"))})

    def choose_compile_order(self, mode: Mode) -> CompileOrder:
        """Return the order.  Python's linkers and JAX have no cache on disk; Numba writes one at the first call."""
        linker = get_mode(mode).linker
        if isinstance(linker, NumbaLinker):
            return CompileOrder.AT_FIRST_CALL if pytensor.config.numba__cache else CompileOrder.IN_PARALLEL
        return CompileOrder.IN_PARALLEL if isinstance(linker, JAXLinker | PerformLinker) else CompileOrder.MASTER_FIRST

    def writes_cache_at_first_call(self, function: CompiledFunction) -> bool:
        """Whether Numba caches a function.  It does not if an Op, such as a Python callback, has no cache key."""
        is_numba = isinstance(function.maker.linker, NumbaLinker)
        return is_numba and function.vm.jit_fn.stats.cache_path is not None

    def compile_now(self, function: CompiledFunction) -> None:
        """Make Numba compile the function for the types of the values."""
        from numba import typeof

        arguments = tuple([storage[0] for storage in function.vm.inputs])
        function.vm.jit_fn.compile((typeof(arguments),))  # it takes all arguments as one tuple

    def get_static_shape(self, variable: Variable) -> tuple[int | None, ...]:
        """Return the static shape of a variable's type."""
        return tuple(variable.type.shape)


make_key_files_atomic(KeyData)
LIBRARY = PyTensor(pytensor)
