"""Interface of model classes, which is that of Theano-MPI's models.

A model class need not inherit from a class of this library.  Its methods and attributes are found by name, and checked
before the run.  Each method is called with the arguments that its signature accepts.
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
from synkhronos.training.checkpoints.variables_by_role import VariablesByRole

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
    """Return a line for each missing or invalid attribute of a model class or its instance.

    For a class only methods are checked: its constructor and ``compile_iter_fns`` set the attributes.
    """
    problems = [
        f"method {name}(): {purpose}" for name, purpose in METHODS.items() if not callable(getattr(model, name, None))
    ]
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
    for name, minimum in (("n_batch_train", 1), ("n_batch_val", 0)):
        count = getattr(data, name, None)
        if isinstance(count, bool) or not isinstance(count, int | np.integer) or count < minimum:
            problems.append(
                f"attribute data.{name}: expected a number of batches, at least {minimum}, got {_shorten(count)}"
            )
    return problems


def check_complete(model: Any, name: str) -> None:
    """Raise `ContractError` if a model class or its instance lacks a method or an attribute, with a line for each."""
    lines = list_missing(model)
    if lines:
        raise ContractError(f"{name} lacks:\n" + "\n".join(f"  {line}" for line in lines))


def _shorten(value: Any) -> str:
    """Return the ``repr`` of a value, cut to 60 characters, for an error message."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def load_class(root: str, module: str, class_name: str) -> Any:
    """Import the user's module, and return the model class in it.

    The module may import other modules in its folder by their names, as a script may.
    """
    if root not in sys.path:
        sys.path.insert(0, root)
    module_folder = str(Path(root, *module.split(".")[:-1]))
    if module_folder not in sys.path:
        sys.path.append(module_folder)
    model_class = getattr(importlib.import_module(module), class_name, None)
    if not isinstance(model_class, type):
        raise ContractError(f"modelclass: {class_name!r} of {module}: expected a class, got {model_class!r}")
    return model_class


def make_config(settings: Settings, rank: int, size: int) -> dict[str, Any]:
    """Make the ``config`` of a rank's instance."""
    names = {"rank": rank, "size": size, "verbose": rank == 0, "seed": settings.seed, "mname": settings.modelclass}
    return {**names, **settings.config}


def make_instance(model_class: type, config: dict[str, Any]) -> Any:
    """Make an instance of a model class, whose constructor takes the config or no argument.

    Raises
    ------
    ContractError
        If the constructor has more than one required argument.
    """
    parameters = [p for p in inspect.signature(model_class).parameters.values() if p.kind is not p.VAR_KEYWORD]
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.KEYWORD_ONLY)]
    if len(needed) > 1:
        raise ContractError(
            f"{model_class.__name__}(): expected a class that takes one config, got one that takes {needed}"
        )
    return model_class(config) if parameters else model_class()


def compile_functions(model: Any, sync_type: str) -> None:
    """Call ``compile_iter_fns``, with ``sync_type`` if it has this parameter.

    Theano-MPI calls the exchange of gradients "cdd", and that of parameters "avg".  If ``size > 1``, its models compile
    a function for gradients and one for updates, which only "cdd" can use.  So for "avg" ``size`` is 1 during the call.
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
    """Set the options of a `synkhronos.launch.Model`'s step; return True if they need the gradient of all ranks.

    Parameters
    ----------
    model : instance
    options : dict
        The setting ``model_options``, which overrides attributes of the class.
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


def compile_model(model: Any, settings: Settings, rule: Rule, size: int, needs_gradients: bool) -> str | None:
    """Compile an instance's functions, and choose whether ranks exchange gradients or parameters under BSP.

    The option ``average`` of the rule decides; by default they exchange gradients if the class has ``vels`` and
    ``vels2``.

    Parameters
    ----------
    model : instance
    settings : Settings
    rule : Rule
    size : int
        Number of ranks.
    needs_gradients : bool
        Whether options of the step need the gradient of all ranks: the result of `set_options`.

    Returns
    -------
    {"gradient", "params"} or None
        None if ranks do not exchange after each step.

    Raises
    ------
    ContractError
        If ranks would exchange gradients, but ``vels`` and ``vels2`` are not lists of variables of equal shapes.
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
    """Call a method with those arguments that its signature accepts: leading positional ones, and named ones."""
    parameters = inspect.signature(method).parameters.values()
    accepts_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = {key: value for key, value in named.items() if accepts_all or any(p.name == key for p in parameters)}
    n_positional = 0
    for parameter in parameters:
        if parameter.kind is parameter.VAR_POSITIONAL:
            n_positional = len(arguments)
        elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            n_positional += parameter.name not in named
    return method(*arguments[:n_positional], **named)


def get_n_sub_batches(model: Any) -> int:
    """Return the number of steps per batch: ``n_subb`` of the model, by default 1."""
    return max(1, int(getattr(model, "n_subb", 1)))


def parse_next_batch(returned: Any, batch: int, next_batch: int) -> tuple[int, bool]:
    """Interpret the return value of ``val_iter``.

    Parameters
    ----------
    returned : None, int or "stop"
        The return value.
    batch : int
        Number of the batch that was validated.
    next_batch : int
        Number of the next batch, unless ``returned`` is a number.

    Returns
    -------
    next_batch : int
        Number of the next batch.
    has_stopped : bool
        Whether the validation and the run end.

    Raises
    ------
    ContractError
        If ``returned`` is another value, or a number that is not above ``batch``.

    Examples
    --------
    >>> [parse_next_batch(returned, 3, 4) for returned in (None, 7, "stop")]
    [(4, False), (7, False), (4, True)]
    """
    if returned is None:
        return next_batch, False
    if isinstance(returned, str) and returned == "stop":
        return next_batch, True
    if isinstance(returned, int | np.integer) and not isinstance(returned, bool) and returned > batch:
        return int(returned), False
    raise ContractError(
        f"val_iter(): expected it to return None, 'stop', or the number of the next batch, above {batch}, got "
        f"{_shorten(returned)}"
    )


def get_batch_size(model: Any) -> int:
    """Return the number of rows of a batch: ``batch_size`` of the model or its data.

    It is 1 for a model without ``batch_size``, whose speed is then reported in batches.
    """
    size = getattr(model, "batch_size", getattr(model.data, "batch_size", 1))
    return int(size) if isinstance(size, int | np.integer) else 1


def group_variables(model: Any, exclude_normalization: bool = False) -> VariablesByRole:
    """Group the shared variables of a model's compiled functions by role, for checkpoints.

    The functions are attributes of the model, or elements of lists that are attributes.  They are visited in the
    alphabetical order of the attributes, so the order is equal on all ranks and in all runs.

    - `params` and `excluded`: the model's ``params``.
    - `optimizer`: floats that a function updates, such as velocities and running averages.
    - `generators`: random generators of a function.
    - `others`: integers that a function updates, and scalars that it reads, such as a learning rate.

    Variables in `Model.shown` and in ``vels2`` are in no group: they are results, and memory of the exchange.

    Parameters
    ----------
    model : instance
    exclude_normalization : bool
        Whether parameters named ``gamma`` or ``beta``, those of batch normalisation, are not exchanged.

    Raises
    ------
    ContractError
        If no parameter remains to be exchanged.
    """
    excluded = [p for p in model.params if exclude_normalization and p.name in ("gamma", "beta")]
    excluded_ids = {id(p) for p in excluded}
    groups = VariablesByRole([p for p in model.params if id(p) not in excluded_ids], [], excluded, [], [])
    averages = getattr(model, "averages", None)
    if isinstance(averages, Mapping):  # a `Model`, whose params end with the averages
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


def _group_function(function: Any, groups: VariablesByRole, seen: set[int]) -> None:
    """Add the shared variables of a compiled function to ``groups``; do nothing for other objects.

    ``seen`` has the ids of variables that are already grouped, or belong to no group.  It is extended.
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
    """Return the value of the model's ``shared_lr``, ``lr`` or ``learning_rate``; NaN without any."""
    for name in ("shared_lr", "lr", "learning_rate"):
        value: Any = getattr(model, name, None)
        if hasattr(value, "get_value"):
            value = value.get_value()
        if value is not None and np.ndim(value) == 0:
            return float(value)
    return math.nan


@contextmanager
def use_class_precision() -> Iterator[None]:
    """Within a ``with`` block, set JAX's precision to that for which PyTensor has compiled the model's functions.

    PyTensor enables float64 in JAX only if ``floatX`` is float64, but this library's functions need it enabled.
    """
    jax, pytensor = sys.modules.get("jax"), sys.modules.get("pytensor")
    if jax is None or pytensor is None:  # nothing is compiled yet, and PyTensor then sets the flag itself
        yield
        return
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", pytensor.config.floatX == "float64")
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", before)
