"""Theano 1.0.5, as a `GraphLibrary`.

Overrides are for Theano's two random generators (NumPy's RandomState, MRG31k3p) and for inputs on GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import numpy as np
import theano
import theano.tensor
from theano.compile.io import In, SymbolicInput, SymbolicOutput
from theano.compile.sharedvalue import SharedVariable
from theano.gof.cmodule import KeyData
from theano.gof.graph import Constant, Variable
from theano.tensor.raw_random import RandomStateType

from synkhronos.casts import as_numbers, check_cast
from synkhronos.devices import PYGPU
from synkhronos.graph_libraries.library import GraphLibrary, make_key_files_atomic
from synkhronos.graph_libraries.theano_mrg import is_mrg_state, jump_mrg


class Theano(GraphLibrary):
    """The graph library Theano."""

    tensor = theano.tensor
    variable_class = Variable
    shared_class = SharedVariable
    constant_class = Constant
    input_class = SymbolicInput
    output_class = SymbolicOutput

    def _list_config_variables(self) -> Iterator[tuple[Any, str, bool]]:
        return ((v, v.fullname, v.allow_override) for v in theano.configparser._config_var_list)

    def is_generator(self, shared: SharedVariable) -> bool:
        """Whether the variable holds a RandomState, or the state of an MRG stream."""
        return isinstance(self.borrow_value(shared), np.random.RandomState) or is_mrg_state(shared)

    def check_generator(self, shared: SharedVariable, generator: Any, must_jump: bool) -> None:
        """Raise an error unless the value is a RandomState, or the state of the same number of MRG streams."""
        current_state = self.borrow_value(shared)
        if isinstance(current_state, np.random.RandomState):
            if not isinstance(generator, np.random.RandomState):
                raise TypeError(f"expected a numpy.random.RandomState, got {generator!r}")
            return
        new_state = as_numbers(generator, "the state")
        if new_state.dtype.kind not in "iu":
            raise TypeError(f"expected the state of MRG streams, integers, got an array of {new_state.dtype}")
        if new_state.shape != current_state.shape:
            raise ValueError(f"expected the state of MRG streams of shape {current_state.shape}, got {new_state.shape}")
        check_cast(new_state, current_state.dtype, "the state")

    def copy_generator(self, shared: SharedVariable) -> Any:
        """Return a copy of a RandomState, or the states of MRG streams as an array."""
        state = self.borrow_value(shared)
        return super().copy_generator(shared) if isinstance(state, np.random.RandomState) else np.array(state)

    def set_generator(self, shared: SharedVariable, generator: Any) -> None:
        """Set a RandomState, or states of MRG streams, cast to the variable's dtype."""
        is_state = isinstance(generator, np.random.RandomState)
        super().set_generator(shared, generator if is_state else np.array(generator, shared.type.dtype))

    def jump_generator(self, generator: Any, n_jumps: int) -> Any:
        """Return a RandomState or MRG states ahead in the stream."""
        if not isinstance(generator, np.random.RandomState):
            return jump_mrg(np.asarray(generator), n_jumps)
        source = np.random.MT19937()
        source.state = cast(Any, generator.get_state(legacy=False))
        return np.random.RandomState(source.jumped(n_jumps))

    def _get_default_tuple(self, library_input: Any) -> tuple[Any, ...]:
        """Return a tuple with the default value of an ``In``; an empty tuple if there is none."""
        return (library_input.value,) if isinstance(library_input, In) and library_input.value is not None else ()

    def function(self, inputs: Sequence[Any], outputs: Any = None, **kwargs: Any) -> Callable[..., Any]:
        """Compile a function; inputs that Theano uses on a GPU are arrays of the GPU."""
        inputs, givens = self._replace_inputs(inputs)
        if givens:
            kwargs["givens"] = [*givens, *kwargs.get("givens", [])]
        observers = Variable.construction_observers
        count = len(observers)
        try:
            return super().function(inputs, outputs, **kwargs)
        finally:
            # A rewrite that fails does not remove its observer, a list to which Theano would append all new variables.
            del observers[count:]

    def _replace_inputs(self, inputs: Sequence[Any]) -> tuple[list[Any], list[tuple[Any, Any]]]:
        """Replace inputs that are copied to the GPU by variables of Theano's GpuArrayType.

        Return the inputs, and pairs for ``givens``: a variable, and its replacement transferred to host memory.
        """
        if not PYGPU.is_on_gpu:
            return list(inputs), []
        from theano.gpuarray.type import GpuArrayType

        gpu_inputs, givens = [], []
        for value in inputs:
            spec = self.make_input_spec(value)
            variable_type = spec.variable.type
            if isinstance(variable_type, GpuArrayType) or not PYGPU.accepts_input(
                np.dtype(variable_type.dtype), variable_type.ndim
            ):
                gpu_inputs.append(value)
                continue
            variable = GpuArrayType(variable_type.dtype, variable_type.broadcastable, None)(spec.variable.name)
            default = spec.default_tuple[0] if spec.default_tuple else None
            gpu_inputs.append(
                In(variable, name=spec.name, value=default, mutable=spec.mutable, allow_downcast=spec.allow_downcast)
            )
            givens.append((spec.variable, variable.transfer("cpu")))
        return gpu_inputs, givens

    def store_value(self, shared: SharedVariable, value: Any) -> None:
        """Set a shared variable's value; a GpuArray as its base class without NumPy's operators, as Theano requires."""
        super().store_value(shared, value.view() if PYGPU.owns(value) else value)

    def clone(self, outputs: Sequence[Any], replace: dict[Any, Any]) -> list[Variable]:
        """Return copies of the outputs' graphs with variables replaced."""
        # A variable on a GPU needs a replacement on the GPU.
        converted = {
            v: new if isinstance(new.type, type(v.type)) else self.convert_to_type_of(v, new)
            for v, new in replace.items()
        }
        return list(theano.clone(list(outputs), converted, strict=False))


# It is pickled by its name: Theano compares the type by identity, and would refuse updates of a copied type.
RandomStateType.__reduce__ = lambda self: "random_state_type"
make_key_files_atomic(KeyData)
LIBRARY = Theano(theano)
