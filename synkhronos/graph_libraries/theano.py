"""Theano 1.0.5, as a `GraphLibrary`.

Overrides are for Theano's two random generators (NumPy's RandomState, MRG31k3p) and for inputs on GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import theano
import theano.tensor
from theano.compile.io import In, SymbolicInput, SymbolicOutput
from theano.compile.sharedvalue import SharedVariable
from theano.gof.cmodule import KeyData
from theano.gof.graph import Constant, Variable

from synkhronos.casts import as_numbers, check_cast
from synkhronos.devices import find_device, list_devices
from synkhronos.graph_libraries.library import GraphLibrary, make_key_files_atomic

# MRG31k3p: two recurrences of order 3 modulo these primes (L'Ecuyer and Touzin, "Fast combined multiple recursive
# generators with multipliers of the form a = 2^q +- 2^r", WSC 2000).  One step of each is a product with its matrix.
_MRG_RECURRENCES = (
    (((0, 2**22, 2**7 + 1), (1, 0, 0), (0, 1, 0)), 2**31 - 1),
    (((2**15, 0, 2**15 + 1), (1, 0, 0), (0, 1, 0)), 2**31 - 21069),
)
#: Number of steps between the streams of two ranks.  In Theano, streams of two random variables are 2**134 steps apart,
#: streams of one variable 2**72.  The period is about 2**185.
_MRG_JUMP = 2**166


class Theano(GraphLibrary):
    """The graph library Theano."""

    tensor = theano.tensor
    variable_class = Variable
    shared_class = SharedVariable
    constant_class = Constant
    input_class = SymbolicInput
    output_class = SymbolicOutput

    def is_generator(self, shared: SharedVariable) -> bool:
        """Whether the variable holds a RandomState, or the state of an MRG stream."""
        return isinstance(self.borrow_value(shared), np.random.RandomState) or _is_mrg_state(shared)

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
            return _jump_mrg(np.asarray(generator), n_jumps)
        source = np.random.MT19937()
        source.state = cast(Any, generator.get_state(legacy=False))
        return np.random.RandomState(source.jumped(n_jumps))

    def get_default_value(self, library_input: Any) -> tuple[Any, ...]:
        """Return a tuple with the default value of an ``In``; an empty tuple if there is none."""
        return (library_input.value,) if isinstance(library_input, In) and library_input.value is not None else ()

    def function(self, inputs: Sequence[Any], outputs: Any = None, **kwargs: Any) -> Callable[..., Any]:
        """Compile a function; inputs that Theano uses on a GPU are arrays of the GPU."""
        inputs, replaced = self._replace_inputs(inputs)
        if replaced:
            kwargs["givens"] = [*replaced, *kwargs.get("givens", [])]
        observers = Variable.construction_observers
        count = len(observers)
        try:
            return super().function(inputs, outputs, **kwargs)
        finally:
            # A rewrite that fails does not remove its observer, a list to which Theano would append all new variables.
            del observers[count:]

    def _replace_inputs(self, inputs: Sequence[Any]) -> tuple[list[Any], list[tuple[Any, Any]]]:
        """Replace inputs by variables of a device's type, where a device has one for them.

        Return the inputs, and pairs for ``givens``: a variable, and its replacement transferred to host memory.
        """
        placed, replaced = [], []
        for value in inputs:
            spec = self.make_input_spec(value)
            variables = (device.make_input_variable(spec.variable) for device in list_devices())
            variable = next((variable for variable in variables if variable is not None), None)
            if variable is None:
                placed.append(value)
                continue
            default = spec.default[0] if spec.default else None
            placed.append(
                In(variable, name=spec.name, value=default, mutable=spec.mutable, allow_downcast=spec.allow_downcast)
            )
            replaced.append((spec.variable, variable.transfer("cpu")))
        return placed, replaced

    def store_value(self, shared: SharedVariable, value: Any) -> None:
        """Set a shared variable's value, as an array of the class that Theano expects."""
        super().store_value(shared, find_device(value).to_shared_value(value))

    def clone(self, outputs: Sequence[Any], replace: dict[Any, Any]) -> list[Any]:
        """Return copies of the outputs' graphs with variables replaced."""
        # A variable on a GPU needs a replacement on the GPU.
        converted = {
            v: new if isinstance(new.type, type(v.type)) else self.convert_to_type_of(v, new)
            for v, new in replace.items()
        }
        return list(theano.clone(list(outputs), converted, strict=False))


def _is_mrg_state(shared: SharedVariable) -> bool:
    update = getattr(shared, "default_update", None)
    return update is not None and update.owner is not None and type(update.owner.op).__name__.startswith("mrg_uniform")


def _jump_mrg(state: np.ndarray, n_jumps: int) -> np.ndarray:
    """Return MRG states, of shape (n_streams, 6), ``n_jumps`` jumps ahead."""
    power = n_jumps * _MRG_JUMP
    jumped = [
        np.array(_matrix_power(matrix, power, modulus), object) @ part.astype(object).T % modulus
        for (matrix, modulus), part in zip(_MRG_RECURRENCES, (state[:, :3], state[:, 3:]), strict=True)
    ]
    return np.concatenate(jumped).T.astype(state.dtype)


def _matrix_power(matrix: Sequence[Sequence[int]], power: int, modulus: int) -> Any:
    """Return a power of a 3 by 3 matrix modulo a prime, computed by repeated squaring in exact integers."""
    result, square = np.array(((1, 0, 0), (0, 1, 0), (0, 0, 1)), object), np.array(matrix, object)
    while power:
        if power & 1:
            result = result @ square % modulus
        square = square @ square % modulus
        power >>= 1
    return result


make_key_files_atomic(KeyData)
LIBRARY = Theano(theano)
