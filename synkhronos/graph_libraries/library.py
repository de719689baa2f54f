"""The interface through which all other packages use PyTensor or Theano."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import pickle
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from sys import getrefcount
from types import ModuleType
from typing import Any

import numpy as np

from synkhronos.casts import NUMBER_KINDS, check_cast, check_dense
from synkhronos.containers import WeakKeyDict
from synkhronos.variable_types import CompiledFunction, Mode, Node, SharedVariable, Variable, Variables


class CompileOrder(Enum):
    """Order in which ranks compile a function."""

    #: The master before the workers: ``function`` writes a cache on disk under a lock.
    MASTER_FIRST = 1
    #: All at once: there is no cache on disk.
    IN_PARALLEL = 2
    #: The master before the workers in the first call of the function, which writes the cache.
    AT_FIRST_CALL = 3


@dataclass(frozen=True)
class InputSpec:
    """Specification of one input of a function."""

    variable: Any
    #: Name of the keyword argument; None if the input is positional only.
    name: str | None
    #: Whether the compiled function may overwrite the value.
    mutable: bool
    #: Whether values must have the exact dtype.
    strict: bool
    #: Whether a cast may lose precision; None allows it for Python floats.
    allow_downcast: bool | None
    #: Tuple with the default value; empty if there is none.
    default_tuple: tuple[Any, ...]
    #: The item of ``inputs``: the variable, or an ``In`` that contains it.
    library_input: Any


def get_storage(shared: SharedVariable) -> list[Any]:
    """Return the list of one item that holds a shared variable's value; compiled functions refer to the same list."""
    storage: list[Any] = shared.container.storage
    return storage


def _set_default_updates(updates: Sequence[tuple[SharedVariable, Variable]]) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Setting default_update", DeprecationWarning)
        for shared, update in updates:
            shared.default_update = update


def has_other_references(storage: list[Any]) -> bool:
    """Whether the object in a storage, a list of one item, has other references than that of the list."""
    return getrefcount(storage[0]) > 2  # the list's reference, and the argument of getrefcount


def find_referenced_storages(storages: Sequence[list[Any]]) -> list[list[Any]]:
    """Return the storages for which `has_other_references` is true, without a call for each."""
    return [storage for storage in storages if getrefcount(storage[0]) > 2]


#: Functions that are called with the object, a shared variable and its old value, or None if that is unknown, after the
#: user's ``set_value``, and after another change of the master's value alone.
set_value_callbacks: WeakKeyDict[Any, Callable[[Any, SharedVariable, Any], None]] = WeakKeyDict()


def observe_set_value(shared_class: Any) -> None:
    """Patch the ``set_value`` of a class of shared variables to call `set_value_callbacks`, if it does not yet."""
    original = shared_class.set_value
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def set_value(shared: SharedVariable, *args: Any, **kwargs: Any) -> None:
        old_value = get_storage(shared)[0]
        original(shared, *args, **kwargs)
        call_set_value_callbacks(shared, old_value)

    shared_class.set_value = set_value


def call_set_value_callbacks(shared: SharedVariable, old_value: Any = None) -> None:
    """Call `set_value_callbacks` after a change of a shared variable's value."""
    for owner in set_value_callbacks:
        if (callback := set_value_callbacks.get(owner)) is not None:
            callback(owner, shared, old_value)


def make_key_files_atomic(key_data_class: Any) -> None:
    """Patch the library's ``KeyData`` to replace its file atomically, so that ranks can share a compilation directory.

    The library writes into the existing file.  A rank that reads an incomplete file deletes the C module as broken.
    Then the writing rank fails, and every other rank that loads the module.
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

    key_data_class.save_pkl = save_pkl


class GraphLibrary(ABC):
    """A graph library: PyTensor or Theano."""

    #: Import name.
    name: str
    #: The module ``tensor`` of the library.
    tensor: ModuleType
    #: Base classes of variables, shared variables and constants.
    variable_class: type
    shared_class: type
    constant_class: type
    #: The classes ``In`` and ``Out``, which wrap inputs and outputs.
    input_class: Any
    output_class: Any

    def __init__(self, package: ModuleType):
        self.name = package.__name__
        self.package = package
        # Not `package.function`: a script may put synkhronos.function in its place before `fork`.
        function_or_module = package.compile.function  # a module in PyTensor 2
        self.package_function = getattr(function_or_module, "function", function_or_module)

    def __reduce__(self) -> str:
        return "LIBRARY"  # its name in the module of its class

    @property
    def floatX(self) -> str:  # noqa: N802 - the libraries' own name
        """The default float dtype."""
        return self.package.config.floatX

    @abstractmethod
    def _list_config_variables(self) -> Iterator[tuple[Any, str, bool]]:
        """Yield the descriptor of each variable of the library's ``config``, its name, and if a script may set it."""

    def list_settings(self) -> dict[str, Any]:
        """Return the values in the library's ``config`` that a script, flag or file has set.

        Defaults that the library computes, such as a compiler's path, are those of the machine, and are left out.
        """
        return {
            name: variable.val
            for variable, name, is_mutable in self._list_config_variables()
            if is_mutable and hasattr(variable, "val") and not callable(variable.default)
            if not variable.is_default or variable.val != variable.default
        }

    def apply_settings(self, settings: Mapping[str, Any]) -> None:
        """Set the values in the library's ``config`` that `list_settings` has returned in another process.

        A value that this process's script had set, and the other's has not, becomes the default.
        """
        own_settings = self.list_settings()
        for variable, name, _ in self._list_config_variables():
            if name in settings:
                value = settings[name]
            elif name in own_settings and variable.is_default:  # neither a flag nor a file has set it
                value = variable.default
            else:
                continue
            if variable.__get__(self.package.config, None) != value:
                variable.__set__(self.package.config, value)

    # -- variables -------------------------------------------------------------------------------------------

    def is_variable(self, value: object) -> bool:
        """Whether the value is a variable of this library."""
        return isinstance(value, self.variable_class)

    def is_shared(self, value: object) -> bool:
        """Whether the value is a shared variable of this library."""
        return isinstance(value, self.shared_class)

    def is_constant(self, value: object) -> bool:
        """Whether the value is a constant of this library."""
        return isinstance(value, self.constant_class)

    def is_array(self, variable: Variable) -> bool:
        """Whether the variable's values are dense arrays with a dtype and a number of dimensions."""
        variable_type = variable.type  # only that of SciPy's sparse matrices has a format
        return (
            hasattr(variable_type, "ndim") and hasattr(variable_type, "dtype") and not hasattr(variable_type, "format")
        )

    def make_input_spec(self, value: Any) -> InputSpec:
        """Return the specification of a function's input, which is a variable or an ``In``."""
        if not isinstance(value, self.input_class):
            return InputSpec(value, value.name, False, False, None, (), value)
        flags = bool(value.mutable), value.strict, value.allow_downcast
        return InputSpec(value.variable, value.name, *flags, self._get_default_tuple(value), value)

    @abstractmethod
    def _get_default_tuple(self, library_input: Any) -> tuple[Any, ...]:
        """Return a tuple with the default value of an ``In``; an empty tuple if there is none."""

    def get_output_variable(self, value: Any) -> Variable:
        """Return the variable of an output, which is a variable or an ``Out``."""
        return value.variable if isinstance(value, self.output_class) else value

    def replace_output_variable(self, output: Any, variable: Variable) -> Any:
        """Return a copy of an output with another variable."""
        if not isinstance(output, self.output_class):
            return variable
        return self.output_class(variable, borrow=output.borrow)

    # -- graphs ----------------------------------------------------------------------------------------------

    def function(self, inputs: Sequence[Any], outputs: Any = None, **kwargs: Any) -> Callable[..., Any]:
        """Compile a function with the library's ``function``."""
        if "no_default_updates" not in kwargs:
            return self.package_function(inputs, outputs, **kwargs)
        with warnings.catch_warnings():  # of PyTensor
            warnings.filterwarnings("ignore", "The no_default_updates parameter", DeprecationWarning)
            return self.package_function(inputs, outputs, **kwargs)

    @contextlib.contextmanager
    def use_default_updates(self, updates: Sequence[tuple[SharedVariable, Variable]]) -> Iterator[None]:
        """Give shared variables other default updates in the ``with`` block."""
        before = [(shared, shared.default_update) for shared, _ in updates]
        _set_default_updates(updates)
        try:
            yield
        finally:
            _set_default_updates(before)

    def shared(self, value: Any, name: str | None = None, **kwargs: Any) -> SharedVariable:
        """Create a shared variable."""
        return self.package.shared(value, name=name, **kwargs)

    def grad(self, cost: Variable, wrt: Variable) -> Variables:
        """Return the gradients of a scalar with respect to variables."""
        return self.package.grad(cost, wrt)

    @abstractmethod
    def clone(self, outputs: Sequence[Any], replace: dict[Any, Any]) -> list[Variable]:
        """Return copies of the outputs' graphs with variables replaced."""

    def is_xla_mode(self, mode: Mode) -> bool:
        """Whether XLA compiles functions of this mode."""
        return False

    def choose_compile_order(self, mode: Mode) -> CompileOrder:
        """Return the order in which ranks compile functions of this mode."""
        return CompileOrder.MASTER_FIRST

    def writes_cache_at_first_call(self, function: CompiledFunction) -> bool:
        """Whether the first call of a function compiles it, and writes the code to a cache on disk."""
        return False

    def compile_now(self, function: CompiledFunction) -> None:  # noqa: B027 - only Numba compiles later
        """Compile a function without inputs before its first call, for the types of its shared variables' values."""

    def sort_nodes(self, variables: Sequence[Variable]) -> list[Node]:
        """Return the Apply nodes from which variables are computed, in topological order.

        A shared variable depends on its default update.
        """
        sorted_nodes: list[Any] = []
        seen: set[int] = set()
        stack = [(node, False) for node in map(self._get_source_node, variables) if node is not None]
        while stack:
            node, are_inputs_sorted = stack.pop()
            if are_inputs_sorted:
                sorted_nodes.append(node)
                continue
            if id(node) in seen:
                continue
            seen.add(id(node))
            stack.append((node, True))
            stack.extend((source, False) for source in map(self._get_source_node, node.inputs) if source is not None)
        return sorted_nodes

    def _get_source_node(self, variable: Variable) -> Any:
        """Return the node that computes a variable, or a shared variable's default update; None if there is none."""
        seen: set[int] = set()
        while variable is not None and variable.owner is None and id(variable) not in seen:
            seen.add(id(variable))
            variable = getattr(variable, "default_update", None) if self.is_shared(variable) else None
        return None if variable is None else variable.owner

    def find_shareds(self, variables: Sequence[Variable]) -> list[SharedVariable]:
        """Return the shared variables on which variables depend, each once, in the graph's order."""
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

    def borrow_value(self, shared: SharedVariable) -> Any:
        """Return a shared variable's value without a copy: an array, or a random generator."""
        return shared.container.storage[0]

    def store_value(self, shared: SharedVariable, value: Any) -> None:
        """Set a shared variable's value, without a copy where the type allows it."""
        if isinstance(value, np.ndarray):
            shared.container.value = value
        else:  # the type's filter might copy an array of a device to host memory
            get_storage(shared)[0] = value

    @abstractmethod
    def is_generator(self, shared: SharedVariable) -> bool:
        """Whether a shared variable holds the state of a random number generator."""

    @abstractmethod
    def check_generator(self, shared: SharedVariable, generator: Any, must_jump: bool) -> None:
        """Raise TypeError or ValueError if a variable can't hold a generator, or if it has to jump and can't."""

    def copy_generator(self, shared: SharedVariable) -> Any:
        """Return a copy of a random generator at its current position in the stream."""
        return copy.deepcopy(self.borrow_value(shared))

    def track_generators(self, function: CompiledFunction) -> None:  # noqa: B027 - Theano's are shared
        """Record the generators in a function that the user compiled, for `copy_generator` and `set_generator`."""

    def set_generator(self, shared: SharedVariable, generator: Any) -> None:
        """Set a random generator's state."""
        self.store_value(shared, generator)

    @abstractmethod
    def jump_generator(self, generator: Any, n_jumps: int) -> Any:
        """Return a generator that is ``n_jumps`` jumps ahead.  Streams that are a jump apart do not overlap.

        A jump (NumPy's ``jumped``) is about 0.618 * 2**128 draws long for PCG64, whose period is 2**128, and 2**128
        draws for MT19937 and Philox.
        """

    def filter(
        self, variable_type: Any, value: Any, strict: bool = False, allow_downcast: bool | None = None
    ) -> np.ndarray:
        """Return a value as an array of a variable's type; the flags are those of `InputSpec`.

        An error of the library is raised, or TypeError if a cast would change a number without ``allow_downcast``.
        """
        check_dense(value, "value")
        if value is None or (isinstance(value, np.ndarray) and value.dtype.hasobject):
            raise TypeError(f"expected numbers, got {'None' if value is None else 'an array of objects'}")
        array = np.asarray(variable_type.filter(value, strict=strict, allow_downcast=allow_downcast))
        if array is not value and not allow_downcast and getattr(value, "dtype", None) != array.dtype:
            original = np.asarray(value)
            if original.dtype.kind in NUMBER_KINDS:
                check_cast(original, array.dtype, "value")
        return array

    def convert_to_type_of(self, variable: Variable, expression: Variable) -> Variable:
        """Return an expression or a value, such as an update's, as a variable of the type of ``variable``."""
        return variable.type.filter_variable(expression, allow_convert=True)

    def accepts_shape(self, shared: SharedVariable, shape: tuple[int, ...]) -> bool:
        """Whether a shared variable's type allows values of this shape."""
        fixed = self.get_static_shape(shared)
        return len(fixed) == len(shape) and all(f is None or f == s for f, s in zip(fixed, shape, strict=True))

    def get_static_shape(self, variable: Variable) -> tuple[int | None, ...]:
        """Return the static shape of a variable's type, with None for each unknown length."""
        return tuple(1 if b else None for b in variable.type.broadcastable)
