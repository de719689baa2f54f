"""What PyTensor and Theano have in common.

`GraphLibrary`
    Compiles, clones and walks graphs; reads and writes shared variables; moves random generators.
`Input`
    One input of a function, whatever the user wrapped it in.
`is_referenced`
    Whether somebody has a value beside the container that it is in.
`write_keys_at_once`
    Lets ranks compile beside each other with a cache of C modules on disk.
"""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from sys import getrefcount
from types import ModuleType
from typing import Any

import numpy as np

from synkhronos.casts import NUMBERS, check_cast, check_dense
from synkhronos.devices import Device

#: How ranks compile; see `GraphLibrary.compiles`.
IN_TURN, AT_ONCE, AT_FIRST_CALL = "in turn", "at once", "at the first call"


@dataclass(frozen=True)
class Input:
    """One input of a function."""

    #: The symbolic variable.
    variable: Any
    #: Under which it may be passed by keyword.
    name: str | None
    #: Whether the compiled function may overwrite what it is given.
    mutable: bool
    #: Whether values have to have the exact dtype.
    strict: bool
    #: Whether values may lose precision when they are cast; None allows it for Python floats.
    allow_downcast: bool | None
    #: A value to use where none is passed, in a list of one; empty if there is none.
    default: tuple[Any, ...]
    #: What the user passed: the variable itself, or the library's ``In`` around it.
    wrapped: Any


def is_referenced(cell: list[Any]) -> bool:
    """Whether anybody has a reference to what is in a list of one beside the list: a container's storage."""
    return getrefcount(cell[0]) > 2  # the list's, and the one that this call is given


def write_keys_at_once(key_data: Any) -> None:
    """Have ``KeyData``, which knows a compiled C module's keys, replace the file that they are in.

    The libraries' own writes into it.  A rank that reads it meanwhile finds no end, takes the module for broken, and
    deletes it; then the rank that writes fails, and so does whoever wants to load the module.
    """

    def save_pkl(self: Any) -> None:
        part = f"{self.key_pkl}.{os.getpid()}"
        try:
            with open(part, "wb") as file:
                pickle.dump(self, file, pickle.HIGHEST_PROTOCOL)
            os.replace(part, self.key_pkl)
        except BaseException:
            with contextlib.suppress(OSError):
                os.remove(part)
            raise

    key_data.save_pkl = save_pkl


class GraphLibrary:
    """One graph library, by its own package: ``pytensor`` or ``theano``."""

    name: str
    #: ``pytensor.tensor`` or ``theano.tensor``.
    tensor: ModuleType
    #: The classes of all variables, of shared ones, and of constants.
    variable_class: type
    shared_class: type
    constant_class: type
    #: Those in which users wrap inputs and outputs.
    input_class: Any
    output_class: Any

    def __init__(self, package: ModuleType):
        self.name = package.__name__
        self.package = package

    def __reduce__(self) -> Any:
        from synkhronos.graphs import library_named  # the package imports this module first

        return library_named, (self.name,)

    @property
    def floatX(self) -> str:  # noqa: N802 - the libraries' own word
        """The default float dtype."""
        return self.package.config.floatX

    # -- what is what ----------------------------------------------------------------------------------------

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

    def input(self, value: Any) -> Input:
        """Describe what the user passed as an input of a function: a variable, or an ``In``."""
        if not isinstance(value, self.input_class):
            return Input(value, value.name, False, False, None, (), value)
        flags = bool(value.mutable), value.strict, value.allow_downcast
        return Input(value.variable, value.name, *flags, self.default(value), value)

    def default(self, wrapped: Any) -> tuple[Any, ...]:
        """Return an ``In``'s default value in a tuple of one; an empty one if there is none."""
        raise NotImplementedError

    def output_variable(self, value: Any) -> Any:
        """Return the variable of an output: itself, or what the library's ``Out`` wraps."""
        return value.variable if isinstance(value, self.output_class) else value

    def with_output_variable(self, output: Any, variable: Any) -> Any:
        """Return the output with another variable in it."""
        if not isinstance(output, self.output_class):
            return variable
        return self.output_class(variable, borrow=output.borrow)

    # -- graphs ----------------------------------------------------------------------------------------------

    def function(self, inputs: Sequence[Any], outputs: Any = None, **kwargs: Any) -> Callable[..., Any]:
        """Compile, with the library's own ``function``."""
        return self.package.function(inputs, outputs, **kwargs)

    def shared(self, value: Any, name: str | None = None, **kwargs: Any) -> Any:
        """Make a shared variable."""
        return self.package.shared(value, name=name, **kwargs)

    def grad(self, cost: Any, wrt: Any) -> Any:
        """Return the gradients of a scalar with respect to variables."""
        return self.package.grad(cost, wrt)

    def clone(self, outputs: Sequence[Any], replace: dict[Any, Any]) -> list[Any]:
        """Return copies of the outputs' graphs with variables replaced."""
        raise NotImplementedError

    def input_device(self, dtype: np.dtype, ndim: int, device: Device) -> Device:
        """Return what holds the values of an input of a function that computes on a device."""
        return device

    def uses_xla(self, mode: Any) -> bool:
        """Whether functions of this mode are compiled by XLA."""
        return False

    def compiles(self, mode: Any) -> str:
        """Return how ranks best compile functions of this mode.

        `IN_TURN` where ``function`` fills a cache on disk and takes a lock; `AT_ONCE` where it does neither;
        `AT_FIRST_CALL` where the first call does, and the cache is to be filled by one rank.
        """
        return IN_TURN

    def leaves_on_disk(self, function: Any) -> bool:
        """Whether the first call leaves on disk what it compiles, so that the other ranks find it there."""
        return True

    def compile_now(self, function: Any) -> None:
        """Compile what is compiled at its first call, and has no inputs; nothing is updated."""

    def check_mode(self, mode: Any) -> None:
        """Raise ValueError for the name of a mode that there is none of, TypeError for what is no mode at all."""
        modes = self.package.compile.mode
        try:
            found = modes.get_mode(mode)
        except Exception as error:  # Theano's has no class of its own
            raise ValueError(f"mode: {self.name} has none that is called {mode!r}: {error}") from None
        if not isinstance(found, modes.Mode):
            raise TypeError(f"mode: expected a mode of {self.name}, or the name of one, got {mode!r}")

    def default_mode(self, device: Device) -> Any:
        """Return the mode of functions for which the user names none, where ranks compute on this device.

        As it is set in the master now: workers may have been started with another.
        """
        return self.package.config.mode

    def nodes(self, variables: Iterable[Any]) -> list[Any]:
        """Return the Apply nodes above some variables, every node after those that it depends on.

        Default updates of shared variables count as above them.
        """
        order: list[Any] = []
        seen: set[int] = set()
        stack: list[tuple[Any, bool]] = [(v.owner, False) for v in variables if v.owner is not None]
        for shared in [v for v in variables if self.is_shared(v)]:
            stack.extend(self._default_update_nodes(shared))
        while stack:
            node, expanded = stack.pop()
            if expanded:
                order.append(node)
                continue
            if id(node) in seen:
                continue
            seen.add(id(node))
            stack.append((node, True))
            for variable in node.inputs:
                if variable.owner is not None:
                    stack.append((variable.owner, False))
                elif self.is_shared(variable):
                    stack.extend(self._default_update_nodes(variable))
        return order

    def _default_update_nodes(self, shared: Any) -> list[tuple[Any, bool]]:
        update = getattr(shared, "default_update", None)
        return [(update.owner, False)] if update is not None and update.owner is not None else []

    def shareds(self, variables: Sequence[Any]) -> list[Any]:
        """Return the shared variables among and above some variables, each once, in the graph's order."""
        found: dict[int, Any] = {}
        leaves = list(variables)
        for node in self.nodes(variables):
            leaves.extend(node.inputs)
        for variable in leaves:
            if self.is_shared(variable) and id(variable) not in found:
                found[id(variable)] = variable
                leaves.append(getattr(variable, "default_update", None))  # may be another shared variable itself
        return list(found.values())

    # -- values ----------------------------------------------------------------------------------------------

    def filter(self, kind: Any, value: Any, strict: bool = False, allow_downcast: bool | None = None) -> np.ndarray:
        """Return a value as an array of a type of variables: cast where the library casts, and no number changes.

        Raises
        ------
        TypeError, ValueError, AttributeError
            Where the library refuses the value, or would change a number without being told to by ``allow_downcast``.
        """
        check_dense(value, "value")
        array = np.asarray(kind.filter(value, strict=strict, allow_downcast=allow_downcast))
        if not allow_downcast and getattr(value, "dtype", None) != array.dtype:
            given = np.asarray(value)
            if given.dtype.kind in NUMBERS:
                check_cast(given, array.dtype, "value")
        return array

    def convert(self, shared: Any, expression: Any) -> Any:
        """Return an update's expression, or its value, as a variable of the shared variable's type."""
        return shared.type.filter_variable(expression, allow_convert=True)

    def get(self, shared: Any) -> Any:
        """Return the array in a shared variable's container: the container's own, not a copy."""
        return shared.container.storage[0]

    def is_referenced(self, shared: Any) -> bool:
        """Whether anybody has a reference to the array in a shared variable's container beside the container."""
        return is_referenced(shared.container.storage)

    def put(self, shared: Any, value: Any) -> None:
        """Put an array into a shared variable's container, as it is where the type allows."""
        if isinstance(value, np.ndarray):
            shared.container.value = value
        else:  # a device's array, which the type might take for something to be copied to the host
            shared.container.storage[0] = value

    def accepts(self, shared: Any, shape: tuple[int, ...]) -> bool:
        """Whether values of this shape fit the shared variable's type."""
        fixed = self.fixed_shape(shared)
        return len(fixed) == len(shape) and all(f is None or f == s for f, s in zip(fixed, shape, strict=True))

    def fixed_shape(self, variable: Any) -> tuple[int | None, ...]:
        """Return the lengths that the variable's type fixes, None where it leaves them open."""
        return tuple(1 if b else None for b in variable.type.broadcastable)

    def check_stream(self, shared: Any, value: Any, moves: bool) -> None:
        """Raise TypeError or ValueError for what a random generator's variable can't take, or can't be moved in."""

    def stream(self, shared: Any) -> Any:
        """Return where a random generator is in its stream: a copy of its value."""
        return copy.deepcopy(self.get(shared))

    def follow_streams(self, function: Any) -> None:
        """Have `stream` and `set_stream` speak of what a function draws that the user has compiled."""

    def set_stream(self, shared: Any, value: Any) -> None:
        """Have a random generator go on from there."""
        self.put(shared, value)

    def moved(self, value: Any, distance: int) -> Any:
        """Return a place ``distance`` jumps ahead in its stream: streams so moved apart never meet.

        NumPy's jumps (``jumped`` in its documentation) are 2**127 draws long for PCG64, 2**128 for MT19937 and Philox.
        """
        raise NotImplementedError


def check_jumps(bit_generator: Any) -> None:
    """Raise TypeError for a NumPy bit generator that can't jump."""
    if not hasattr(bit_generator, "jumped"):
        raise TypeError(
            f"random numbers of {type(bit_generator).__name__} can't be moved apart by rank: it has no jumps; "
            "use numpy.random.PCG64 (the default), Philox or MT19937"
        )
