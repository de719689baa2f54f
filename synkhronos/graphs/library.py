"""The part that PyTensor and Theano have in common: variables, functions, shared variables and random generators.

`GraphLibrary` is the interface through which all other packages use a graph library.
"""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from sys import getrefcount
from types import ModuleType
from typing import Any

import numpy as np

from synkhronos.casts import NUMBERS, check_cast, check_dense
from synkhronos.devices import Device

#: Orders in which ranks compile; see `GraphLibrary.choose_compile_order`.
IN_TURN, AT_ONCE, AT_FIRST_CALL = "in turn", "at once", "at the first call"


@dataclass(frozen=True)
class InputSpec:
    """Specification of one input of a function.

    Attributes
    ----------
    variable : variable
        The symbolic variable.
    name : str or None
        Keyword by which a value may be passed.
    mutable : bool
        Whether the compiled function may overwrite the value.
    strict : bool
        Whether values must have the exact dtype.
    allow_downcast : bool or None
        Whether a cast may lose precision; None allows it for Python floats.
    default : tuple
        The default value in a tuple of one; empty if there is none.
    wrapped : variable or In
        The user's argument: the variable itself, or the library's ``In`` around it.
    """

    variable: Any
    name: str | None
    mutable: bool
    strict: bool
    allow_downcast: bool | None
    default: tuple[Any, ...]
    wrapped: Any


def is_referenced(cell: list[Any]) -> bool:
    """Whether the object in a list of one, such as a container's storage, has references other than the list's."""
    return getrefcount(cell[0]) > 2  # the list's reference, and that of this call's argument


def make_key_files_atomic(key_data: Any) -> None:
    """Patch the library's ``KeyData`` to replace its file atomically, so that ranks may share a compilation directory.

    The library itself writes into the existing file.  A rank that reads an incomplete file takes the C module for
    broken and deletes it; then the rank that writes fails, and so does every other that loads the module.

    Parameters
    ----------
    key_data : type
        The library's class ``KeyData``, which stores the keys of a compiled C module.
    """

    def save_pkl(self: Any) -> None:
        temporary = f"{self.key_pkl}.{os.getpid()}"
        try:
            with open(temporary, "wb") as file:
                pickle.dump(self, file, pickle.HIGHEST_PROTOCOL)
            os.replace(temporary, self.key_pkl)
        except BaseException:
            with contextlib.suppress(OSError):
                os.remove(temporary)
            raise

    key_data.save_pkl = save_pkl


class GraphLibrary:
    """One graph library.

    The methods `function`, `shared`, `grad`, `clone` and `filter` are the library's own functions of these names.

    Parameters
    ----------
    package : module
        ``pytensor`` or ``theano``.

    Attributes
    ----------
    name : str
        Import name.
    tensor : module
        ``pytensor.tensor`` or ``theano.tensor``.
    variable_class, shared_class, constant_class : type
        Classes of all variables, of shared variables, and of constants.
    input_class, output_class : type
        Classes ``In`` and ``Out`` that wrap inputs and outputs.
    """

    name: str
    tensor: ModuleType
    variable_class: type
    shared_class: type
    constant_class: type
    input_class: Any
    output_class: Any

    def __init__(self, package: ModuleType):
        self.name = package.__name__
        self.package = package

    def __reduce__(self) -> str:
        return "LIBRARY"  # its name in the module of its class

    @property
    def floatX(self) -> str:  # noqa: N802 - the libraries' own name
        """The default float dtype."""
        return self.package.config.floatX

    # -- variables -------------------------------------------------------------------------------------------

    def is_variable(self, value: Any) -> bool:
        """Whether the value is a variable of this library."""
        return isinstance(value, self.variable_class)

    def is_shared(self, value: Any) -> bool:
        """Whether the value is a shared variable of this library."""
        return isinstance(value, self.shared_class)

    def is_constant(self, value: Any) -> bool:
        """Whether the value is a constant of this library."""
        return isinstance(value, self.constant_class)

    def is_array(self, variable: Any) -> bool:
        """Whether the variable's values are arrays with a dtype and a number of dimensions."""
        kind = variable.type
        return hasattr(kind, "ndim") and hasattr(kind, "dtype") and not self.is_sparse(variable)

    def is_sparse(self, variable: Any) -> bool:
        """Whether the variable's values are SciPy's sparse matrices."""
        return hasattr(variable.type, "format")

    def is_generator(self, shared: Any) -> bool:
        """Whether a shared variable holds the state of a random number generator."""
        raise NotImplementedError

    def describe_input(self, value: Any) -> InputSpec:
        """Return the specification of a function's input, which is a variable or an ``In``."""
        if not isinstance(value, self.input_class):
            return InputSpec(value, value.name, False, False, None, (), value)
        flags = bool(value.mutable), value.strict, value.allow_downcast
        return InputSpec(value.variable, value.name, *flags, self.get_default(value), value)

    def get_default(self, wrapped: Any) -> tuple[Any, ...]:
        """Return the default value of an ``In`` in a tuple of one; an empty tuple if there is none."""
        raise NotImplementedError

    def get_output_variable(self, value: Any) -> Any:
        """Return the variable of an output, which is a variable or an ``Out``."""
        return value.variable if isinstance(value, self.output_class) else value

    def replace_output_variable(self, output: Any, variable: Any) -> Any:
        """Return a copy of an output with another variable."""
        if not isinstance(output, self.output_class):
            return variable
        return self.output_class(variable, borrow=output.borrow)

    # -- graphs ----------------------------------------------------------------------------------------------

    def function(self, inputs: Sequence[Any], outputs: Any = None, **kwargs: Any) -> Callable[..., Any]:
        """Compile a function with the library's ``function``."""
        return self.package.function(inputs, outputs, **kwargs)

    def shared(self, value: Any, name: str | None = None, **kwargs: Any) -> Any:
        """Create a shared variable."""
        return self.package.shared(value, name=name, **kwargs)

    def grad(self, cost: Any, wrt: Any) -> Any:
        """Return the gradients of a scalar with respect to variables."""
        return self.package.grad(cost, wrt)

    def clone(self, outputs: Sequence[Any], replace: dict[Any, Any]) -> list[Any]:
        """Return copies of the outputs' graphs with variables replaced."""
        raise NotImplementedError

    def is_xla_mode(self, mode: Any) -> bool:
        """Whether XLA compiles functions of this mode."""
        return False

    def choose_compile_order(self, mode: Any) -> str:
        """Return the order in which ranks compile functions of this mode.

        Returns
        -------
        str
            `IN_TURN` if ``function`` writes a cache on disk and takes a lock; `AT_ONCE` if it does neither;
            `AT_FIRST_CALL` if the first call of the function does, so that one rank has to make it first.
        """
        return IN_TURN

    def has_disk_cache(self, function: Any) -> bool:
        """Whether the first call of a function writes the compiled code to disk, where other ranks find it."""
        return True

    def compile_now(self, function: Any) -> None:
        """Compile a function without inputs that would be compiled at its first call; nothing is updated."""

    def check_mode(self, mode: Any) -> None:
        """Raise ValueError for the name of an unknown mode, and TypeError for a value that is not a mode."""
        modes = self.package.compile.mode
        try:
            resolved = modes.get_mode(mode)
        except Exception as error:  # Theano raises Exception itself
            raise ValueError(f"mode: {self.name} has none that is called {mode!r}: {error}") from None
        if not isinstance(resolved, modes.Mode):
            raise TypeError(f"mode: expected a mode of {self.name}, or the name of one, got {mode!r}")

    def get_default_mode(self, device: Device) -> Any:
        """Return the default mode of functions that compute on a device.

        It is read in the master when a function is made: the workers' configuration may be another.
        """
        return device.default_mode or self.package.config.mode

    def sort_nodes(self, variables: Sequence[Any]) -> list[Any]:
        """Return the Apply nodes above some variables in topological order: every node follows its dependencies.

        A shared variable depends on its default update.
        """
        order: list[Any] = []
        seen: set[int] = set()
        stack = [(node, False) for node in map(self._get_source_node, variables) if node is not None]
        while stack:
            node, expanded = stack.pop()
            if expanded:
                order.append(node)
                continue
            if id(node) in seen:
                continue
            seen.add(id(node))
            stack.append((node, True))
            stack.extend((source, False) for source in map(self._get_source_node, node.inputs) if source is not None)
        return order

    def _get_source_node(self, variable: Any) -> Any:
        """Return the node that computes a variable or a shared variable's default update; None if there is none.

        A default update may be a shared variable, which has its own.
        """
        seen: set[int] = set()
        while variable is not None and variable.owner is None and id(variable) not in seen:
            seen.add(id(variable))
            variable = getattr(variable, "default_update", None) if self.is_shared(variable) else None
        return None if variable is None else variable.owner

    def find_shareds(self, variables: Sequence[Any]) -> list[Any]:
        """Return the shared variables among and above some variables, each once, in the graph's order."""
        shareds: dict[int, Any] = {}
        leaves = list(variables)
        for node in self.sort_nodes(variables):
            leaves.extend(node.inputs)
        for variable in leaves:
            if self.is_shared(variable) and id(variable) not in shareds:
                shareds[id(variable)] = variable
                leaves.append(getattr(variable, "default_update", None))  # may itself be a shared variable
        return list(shareds.values())

    # -- values ----------------------------------------------------------------------------------------------

    def filter(self, kind: Any, value: Any, strict: bool = False, allow_downcast: bool | None = None) -> np.ndarray:
        """Return a value as an array of a variable's type, cast only if no number changes.

        Parameters
        ----------
        kind : Type
            The type of the variable.
        value : array_like
        strict, allow_downcast
            As in `InputSpec`.

        Raises
        ------
        TypeError, ValueError, AttributeError
            If the library refuses the value, or if the cast would change a number and ``allow_downcast`` is not set.
        """
        check_dense(value, "value")
        array = np.asarray(kind.filter(value, strict=strict, allow_downcast=allow_downcast))
        if not allow_downcast and getattr(value, "dtype", None) != array.dtype:
            given = np.asarray(value)
            if given.dtype.kind in NUMBERS:
                check_cast(given, array.dtype, "value")
        return array

    def convert(self, shared: Any, expression: Any) -> Any:
        """Convert an update's expression, or its value, to a variable of the shared variable's type."""
        return shared.type.filter_variable(expression, allow_convert=True)

    def get(self, shared: Any) -> Any:
        """Return the array in a shared variable's container, without a copy."""
        return shared.container.storage[0]

    def is_referenced(self, shared: Any) -> bool:
        """Whether the array in a shared variable's container has references other than the container's."""
        return is_referenced(shared.container.storage)

    def put(self, shared: Any, value: Any) -> None:
        """Put an array into a shared variable's container, without a copy where the type allows it."""
        if isinstance(value, np.ndarray):
            shared.container.value = value
        else:  # a device's array, which the type's filter might copy to host memory
            shared.container.storage[0] = value

    def can_hold(self, shared: Any, shape: tuple[int, ...]) -> bool:
        """Whether a shared variable's type allows values of this shape."""
        fixed = self.get_fixed_shape(shared)
        return len(fixed) == len(shape) and all(f is None or f == s for f, s in zip(fixed, shape, strict=True))

    def get_fixed_shape(self, variable: Any) -> tuple[int | None, ...]:
        """Return the static shape of a variable's type, with None for each unknown length."""
        return tuple(1 if b else None for b in variable.type.broadcastable)

    def check_generator(self, shared: Any, value: Any, jumps: bool) -> None:
        """Check a new value of a random generator's variable.

        Parameters
        ----------
        shared : shared variable
        value : object
            The new state.
        jumps : bool
            Whether ranks will jump to different places in its stream.

        Raises
        ------
        TypeError, ValueError
            If the variable can't hold the value, or if the generator can't jump.
        """

    def copy_generator(self, shared: Any) -> Any:
        """Return a copy of a random generator at its present place in the stream."""
        return copy.deepcopy(self.get(shared))

    def track_generators(self, function: Any) -> None:
        """Apply `copy_generator` and `set_generator` to the generators in a function that the user compiled."""

    def set_generator(self, shared: Any, value: Any) -> None:
        """Set a random generator's state."""
        self.put(shared, value)

    def jump(self, value: Any, n_jumps: int) -> Any:
        """Return a generator ``n_jumps`` jumps ahead in the stream; streams a jump apart never overlap.

        A jump (NumPy's ``jumped``) is 2**127 draws long for PCG64, and 2**128 for MT19937 and Philox.
        """
        raise NotImplementedError


def check_jumps(bit_generator: Any) -> None:
    """Raise TypeError if a NumPy bit generator can't jump."""
    if not hasattr(bit_generator, "jumped"):
        raise TypeError(
            f"random numbers of {type(bit_generator).__name__} can't be moved apart by rank: it has no jumps; "
            "use numpy.random.PCG64 (the default), Philox or MT19937"
        )
