"""Interface of the classes that the launcher trains: that of Theano-MPI's classes.

Users' classes do not inherit from this library.  Their methods and attributes are found by name, they are checked
before the run, and each method is called with the arguments that its signature accepts.
"""

from __future__ import annotations

import importlib
import inspect
import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from synkhronos.graphs import library_of, list_loaded_libraries
from synkhronos.launch.model import Model
from synkhronos.rules import BSP, Rule
from synkhronos.training.variable_groups import VariableGroups

if TYPE_CHECKING:
    from synkhronos.launch.settings import Settings

#: Required methods, and the purpose of each in error messages.
METHODS = {
    "compile_iter_fns": "compiles its functions",
    "train_iter": "takes a step; arguments (count, recorder)",
    "val_iter": "validates a batch; arguments (count, recorder)",
    "adjust_hyperp": "changes the learning rate after an epoch; argument (epoch)",
    "cleanup": "releases files, processes and other resources",
}


class ContractError(TypeError):
    """A class lacks a method or an attribute that the launcher needs, or a method returns an invalid value."""


def list_missing(model: Any) -> list[str]:
    """Return a line for each missing or invalid attribute of a class or an instance.

    On a class only methods are checked: the attributes are set by its constructor or by ``compile_iter_fns``.
    """
    problems = [f"method {name}(): {use}" for name, use in METHODS.items() if not callable(getattr(model, name, None))]
    if isinstance(model, type):
        return problems
    params = getattr(model, "params", None)
    if not isinstance(params, list | tuple) or not params:
        problems.append(f"attribute params: expected a list of shared variables, got {_shorten(params)}")
    else:
        for i, param in enumerate(params):
            if not any(library.is_shared(param) and library.is_array(param) for library in list_loaded_libraries()):
                problems.append(f"attribute params[{i}]: expected a shared variable, got {_shorten(param)}")
            elif np.dtype(param.type.dtype).kind != "f":
                problems.append(f"attribute params[{i}]: expected floats, got {param.type}")
        if not problems and len({id(param) for param in params}) != len(params):
            problems.append("attribute params: a shared variable comes twice")
    data = getattr(model, "data", None)
    if data is None:
        problems.append("attribute data: expected an object with n_batch_train and n_batch_val, got None")
        return problems
    for name, least in (("n_batch_train", 1), ("n_batch_val", 0)):
        count = getattr(data, name, None)
        if isinstance(count, bool) or not isinstance(count, int | np.integer) or count < least:
            problems.append(
                f"attribute data.{name}: expected a number of batches, at least {least}, got {_shorten(count)}"
            )
    return problems


def check_complete(model: Any, name: str) -> None:
    """Raise `ContractError` if a class or an instance lacks a method or an attribute, with a line for each."""
    lines = list_missing(model)
    if lines:
        raise ContractError(f"{name} lacks:\n" + "\n".join(f"  {line}" for line in lines))


def _shorten(value: Any) -> str:
    """Return a value's representation in an error message, of at most 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def load_class(root: str, module: str, class_name: str) -> Any:
    """Import the user's module, and return the class.

    Modules in the file's folder can be imported by their names, as those in a script's folder can.
    """
    if root not in sys.path:
        sys.path.insert(0, root)
    beside = str(Path(root, *module.split(".")[:-1]))
    if beside not in sys.path:
        sys.path.append(beside)
    kind = getattr(importlib.import_module(module), class_name, None)
    if not isinstance(kind, type):
        raise ContractError(f"modelclass: {class_name!r} of {module}: expected a class, got {kind!r}")
    return kind


def make_config(settings: Settings, rank: int, size: int) -> dict[str, Any]:
    """Return the config of a rank's instance."""
    names = {"rank": rank, "size": size, "verbose": rank == 0, "seed": settings.seed, "mname": settings.modelclass}
    return {**names, **settings.config}


def make_instance(kind: type, config: dict[str, Any]) -> Any:
    """Return an instance of a class; its constructor takes the config or no argument.

    Raises
    ------
    ContractError
        If the constructor has more than one required argument.
    """
    parameters = [p for p in inspect.signature(kind).parameters.values() if p.kind is not p.VAR_KEYWORD]
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.KEYWORD_ONLY)]
    if len(needed) > 1:
        raise ContractError(f"{kind.__name__}(): expected a class that takes one config, got one that takes {needed}")
    return kind(config) if parameters else kind()


def compile_functions(model: Any, sync_type: str) -> None:
    """Call ``compile_iter_fns``, with ``sync_type`` if it has this parameter.

    Theano-MPI's classes compile two functions, for gradients and for updates, if ``size > 1``.  Without an exchange of
    gradients they have to compile one.  So ``size`` is 1 during the call, unless gradients are exchanged: "cdd" is
    Theano-MPI's name for that, and "avg" for an exchange of parameters.
    """
    parameters = inspect.signature(model.compile_iter_fns).parameters.values()
    size = getattr(model, "size", 1)
    if sync_type != "cdd" and size != 1:
        model.size = 1
    try:
        if any(p.name == "sync_type" or p.kind is p.VAR_KEYWORD for p in parameters):
            model.compile_iter_fns(sync_type=sync_type)
        elif any(p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters):
            model.compile_iter_fns(sync_type)
        else:
            model.compile_iter_fns()
    finally:
        if sync_type != "cdd" and size != 1:
            model.size = size


def set_options(model: Any, options: Mapping[str, Any], rule: Rule, name: str) -> bool:
    """Set the options of a `synkhronos.launch.Model`'s step; return whether they need the gradient of all ranks.

    Parameters
    ----------
    model : instance
    options : dict
        The setting ``model_options``, which overrides the attributes of the class.
    rule : Rule
        Exchange rule of the run.
    name : str
        Name of the class in errors.

    Raises
    ------
    ContractError
        If the class is not a `Model`, or the rule does not exchange gradients in their own precision.
    """
    if not isinstance(model, Model):
        if options:
            raise ContractError(f"model_options: {name} lacks:\n  the base class synkhronos.launch.Model")
        return False
    model.set_options(options)
    for option in model.step_options:
        if not isinstance(rule, BSP):
            raise ContractError(f"{option}: needs the exchange rule BSP, got {rule!r}")
        if rule.precision is not None:
            raise ContractError(f"{option}: BSP has to exchange gradients in their own precision, got {rule!r}")
    return bool(model.step_options)


def compile_for(model: Any, settings: Settings, rule: Rule, size: int, needs_gradients: bool) -> str | None:
    """Compile an instance's functions, and choose the values that ranks exchange under BSP.

    These are gradients or parameters, by the option ``average`` of the rule; by default gradients if the class has
    ``vels`` and ``vels2``.

    Parameters
    ----------
    model : instance
    settings : Settings
    rule : Rule
    size : int
        Number of ranks.
    needs_gradients : bool
        Whether options of the model's step need the gradient of all ranks, see `set_options`.

    Returns
    -------
    {"gradient", "params"} or None
        None if ranks do not exchange at each step.

    Raises
    ------
    ContractError
        If gradients are to be exchanged, but ``vels`` and ``vels2`` are not lists of variables of equal shapes.
    """
    if not needs_gradients and (not isinstance(rule, BSP) or size == 1):
        compile_functions(model, "avg")
        return None
    average, name = settings.rule_options.get("average"), settings.modelclass
    options = model.step_options if isinstance(model, Model) else None
    if average == "params" or (average is None and options == {}):
        if options:
            raise ContractError(f"{next(iter(options))}: needs rule_options.average = 'gradient', got 'params'")
        compile_functions(model, "avg")
        return "params"
    compile_functions(model, "cdd")
    lists = [getattr(model, variables, None) for variables in ("vels", "vels2")]
    if average is None and not any(lists):
        return "params"
    kinds = [[(p.type.dtype, np.shape(p.get_value())) for p in variables] if variables else [] for variables in lists]
    if not kinds[0] or kinds[0] != kinds[1]:
        raise ContractError(
            f"{name} lacks:\n  attributes vels and vels2: expected lists of shared variables of the same shapes, got "
            f"{_shorten(lists[0])} and {_shorten(lists[1])}; or give --set rule_options.average=params"
        )
    return "gradient"


def call_accepted(method: Any, *arguments: Any, **named: Any) -> Any:
    """Call a method with the arguments that its signature accepts: leading positional ones, and named ones."""
    parameters = inspect.signature(method).parameters.values()
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = {key: value for key, value in named.items() if takes_all or any(p.name == key for p in parameters)}
    taken = 0
    for parameter in parameters:
        if parameter.kind is parameter.VAR_POSITIONAL:
            taken = len(arguments)
        elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            taken += parameter.name not in named
    return method(*arguments[:taken], **named)


def get_sub_batches(model: Any) -> int:
    """Return the number of steps that a batch is split into: the class's ``n_subb``, by default 1."""
    return max(1, int(getattr(model, "n_subb", 1)))


def parse_next_batch(answer: Any, batch: int, following: int) -> tuple[int, bool]:
    """Return the number of the next batch of the validation, and whether ``val_iter`` has ended it and the run.

    Parameters
    ----------
    answer : None, int or "stop"
        Return value of ``val_iter``.
    batch : int
        Number of the batch that was validated.
    following : int
        Number of the next batch if the return value is not a number.

    Raises
    ------
    ContractError
        If it is another value, or a number that is not above ``batch``.

    Examples
    --------
    >>> [parse_next_batch(answer, 3, 4) for answer in (None, 7, "stop")]
    [(4, False), (7, False), (4, True)]
    """
    if answer is None:
        return following, False
    if isinstance(answer, str) and answer == "stop":
        return following, True
    if isinstance(answer, int | np.integer) and not isinstance(answer, bool) and answer > batch:
        return int(answer), False
    raise ContractError(
        f"val_iter(): expected it to return None, 'stop', or the number of the next batch, above {batch}, got "
        f"{_shorten(answer)}"
    )


def get_batch_size(model: Any) -> int:
    """Return the number of rows of a batch: ``batch_size`` of the model or its data.

    It is 1 for a model without one: its speed is in batches.
    """
    size = getattr(model, "batch_size", getattr(model.data, "batch_size", 1))
    return int(size) if isinstance(size, int | np.integer) else 1


def group_variables(model: Any, leave_out_normalization: bool = False) -> VariableGroups:
    """Group the shared variables of a model's compiled functions, for checkpoints.

    The functions are attributes of the model, or elements of lists that are attributes.  They are visited in the
    alphabetical order of the attributes, which is the same on all ranks and in all runs.

    - `params` and `excluded`: the model's ``params``.
    - `optimizer`: floats that a function updates, such as velocities and running averages.
    - `generators`: random streams of a function.
    - `others`: integers that a function updates, and scalars that it reads, such as a learning rate.

    Variables in `Model.shown` are results, and those in ``vels2`` belong to the exchange: neither are in a group.

    Parameters
    ----------
    model : instance
    leave_out_normalization : bool
        Whether parameters named ``gamma`` and ``beta`` are excluded from the exchange.

    Raises
    ------
    ContractError
        If no parameter remains to be exchanged.
    """
    excluded = [p for p in model.params if leave_out_normalization and p.name in ("gamma", "beta")]
    apart = {id(p) for p in excluded}
    groups = VariableGroups([p for p in model.params if id(p) not in apart], [], excluded, [], [])
    averages = getattr(model, "averages", None)
    if isinstance(averages, Mapping):  # a `Model`: its params end with the averages
        groups.n_averages = sum(any(p is average for average in averages) for p in groups.params)
    if not groups.params:
        raise ContractError("params: expected some that are not named gamma or beta, which each rank keeps for itself")
    seen = {
        id(param) for param in (*model.params, *(getattr(model, "vels2", None) or ()), *getattr(model, "shown", ()))
    }
    for _, value in sorted(vars(model).items()):
        for function in value if isinstance(value, list | tuple) else [value]:
            _group_function(function, groups, seen)
    return groups


def _group_function(function: Any, groups: VariableGroups, seen: set[int]) -> None:
    """Add the variables of a compiled function to their groups; other objects have none.

    ``seen`` has the identities of variables that are in a group, or in none by intention; it is extended, too.
    """
    for entry in getattr(getattr(function, "maker", None), "inputs", ()):
        shared = entry.variable
        if not getattr(entry, "implicit", False):
            continue
        library = library_of(shared)
        if library.is_generator(shared):
            library.track_generators(function)
        if id(shared) in seen:
            continue
        seen.add(id(shared))
        if library.is_generator(shared):
            groups.generators.append(shared)
        elif not library.is_array(shared):
            continue
        elif entry.update is not None and np.dtype(shared.type.dtype).kind == "f":
            groups.optimizer.append(shared)
        elif entry.update is not None or shared.type.ndim == 0:
            groups.others.append(shared)


def get_learning_rate(model: Any) -> float:
    """Return the model's learning rate: the value of ``shared_lr``, ``lr`` or ``learning_rate``; NaN without any."""
    for name in ("shared_lr", "lr", "learning_rate"):
        value: Any = getattr(model, name, None)
        if hasattr(value, "get_value"):
            value = value.get_value()
        if value is not None and np.ndim(value) == 0:
            return float(value)
    return math.nan


@contextmanager
def use_class_precision() -> Iterator[None]:
    """Switch JAX to the precision for which PyTensor compiled the class's functions, within a ``with`` block.

    PyTensor enables float64 in JAX only if ``floatX`` is float64.  This library's own functions need it enabled.
    """
    jax, pytensor = sys.modules.get("jax"), sys.modules.get("pytensor")
    if jax is None or pytensor is None:  # PyTensor sets the flag itself when it compiles its first function
        yield
        return
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", pytensor.config.floatX == "float64")
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", before)
