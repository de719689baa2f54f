"""What a class has to have, and how its methods are called.

The contract is Theano-MPI's.

`lacking`
    What an instance lacks.
`make`
    An instance, for a rank.
`compile_functions`, `compile_for`
    Have an instance compile its functions.
`call`
    Call a method with as many arguments as it takes.
`sub_batches`, `next_batch`
    Count batches.
`rows`
    How many rows a batch has.
`groups`
    The shared variables that its compiled functions change.
`ContractError`
    The class is not what it should be.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np

from synkhronos.graphs import library_of, loaded_libraries
from synkhronos.training.storing import Groups

#: The methods that a class has to have, and what each is for.
METHODS = {
    "compile_iter_fns": "compiles its functions",
    "train_iter": "takes a step: train_iter(count, recorder)",
    "val_iter": "validates a batch: val_iter(count, recorder)",
    "adjust_hyperp": "changes the learning rate after an epoch: adjust_hyperp(epoch)",
    "cleanup": "ends what it has begun",
}


class ContractError(TypeError):
    """A class lacks something of the contract."""


def lacking(model: Any) -> list[str]:
    """Return a line for each thing that an instance lacks; a class is asked for methods alone."""
    found = [f"method {name}(): {use}" for name, use in METHODS.items() if not callable(getattr(model, name, None))]
    if isinstance(model, type):
        return found
    params = getattr(model, "params", None)
    if not isinstance(params, list | tuple) or not params:
        found.append(f"attribute params: expected a list of shared variables, got {_short(params)}")
    else:
        for i, param in enumerate(params):
            if not any(library.is_shared(param) and library.is_array(param) for library in loaded_libraries()):
                found.append(f"attribute params[{i}]: expected a shared variable, got {_short(param)}")
            elif np.dtype(param.type.dtype).kind != "f":
                found.append(f"attribute params[{i}]: expected floats, got {param.type}")
        if not found and len({id(param) for param in params}) != len(params):
            found.append("attribute params: a shared variable comes twice")
    data = getattr(model, "data", None)
    if data is None:
        found.append("attribute data: expected an object with n_batch_train and n_batch_val, got None")
        return found
    for name, least in (("n_batch_train", 1), ("n_batch_val", 0)):
        count = getattr(data, name, None)
        if isinstance(count, bool) or not isinstance(count, int | np.integer) or count < least:
            found.append(f"attribute data.{name}: expected a number of batches, at least {least}, got {_short(count)}")
    return found


def check(model: Any, name: str) -> None:
    """Raise `ContractError` if an instance, or a class, lacks something."""
    lines = lacking(model)
    if lines:
        raise ContractError(f"{name} lacks:\n" + "\n".join(f"  {line}" for line in lines))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def make(kind: type, config: dict[str, Any]) -> Any:
    """Return an instance; the class may take the config or nothing."""
    parameters = [p for p in inspect.signature(kind).parameters.values() if p.kind is not p.VAR_KEYWORD]
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.KEYWORD_ONLY)]
    if len(needed) > 1:
        raise ContractError(f"{kind.__name__}(): expected a class that takes one config, got one that takes {needed}")
    return kind(config) if parameters else kind()


def compile_functions(model: Any, sync_type: str) -> None:
    """Call ``compile_iter_fns``, with ``sync_type`` where it takes that, as Theano-MPI's do.

    Where no gradients are exchanged, a class that compiles by its size is to compile a whole step: its size is 1
    meanwhile, as that of Theano-MPI's asynchronous workers.
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


def compile_for(model: Any, average: str | None, name: str) -> str:
    """Compile a class for BSP on several ranks.

    Parameters
    ----------
    model : instance
    average : {"gradient", "params", None}
        What ranks exchange after each step; None is gradients where the class has ``vels`` and ``vels2``.
    name : str
        The class' name, for messages.

    Returns
    -------
    str
        ``"gradient"`` or ``"params"``.

    Raises
    ------
    ContractError
        If gradients are asked for, and the class does not have both lists.
    """
    if average == "params":
        compile_functions(model, "avg")
        return "params"
    compile_functions(model, "cdd")
    lists = [getattr(model, each, None) for each in ("vels", "vels2")]
    if average is None and not any(lists):
        return "params"
    kinds = [[(p.type.dtype, np.shape(p.get_value())) for p in each] if each else [] for each in lists]
    if not kinds[0] or kinds[0] != kinds[1]:
        raise ContractError(
            f"{name} lacks:\n  attributes vels and vels2: expected lists of shared variables of the same shapes, got "
            f"{_short(lists[0])} and {_short(lists[1])}; or give --set rule_options.average=params"
        )
    return "gradient"


def call(method: Any, *arguments: Any, **named: Any) -> Any:
    """Call a method with as many of some arguments as it takes, and those of the named ones that it has."""
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


def sub_batches(model: Any) -> int:
    """Return the number of steps that a batch is for, ``n_subb``."""
    return max(1, int(getattr(model, "n_subb", 1)))


def next_batch(answer: Any, batch: int, following: int) -> tuple[int, bool]:
    """Return the number of the next validation batch, and whether the run is to stop, from what ``val_iter`` returns.

    Examples
    --------
    >>> next_batch(None, 3, 4), next_batch(7, 3, 4), next_batch("stop", 3, 4)
    ((4, False), (7, False), (4, True))
    """
    if answer is None:
        return following, False
    if isinstance(answer, str) and answer == "stop":
        return following, True
    if isinstance(answer, int | np.integer) and not isinstance(answer, bool) and answer > batch:
        return int(answer), False
    raise ContractError(
        f"val_iter(): expected it to return None, 'stop', or the number of the next batch, above {batch}, got "
        f"{_short(answer)}"
    )


def rows(model: Any) -> int:
    """Return the rows of a model's batch; 1 where it doesn't say, so that batches are counted."""
    found = getattr(model, "batch_size", getattr(model.data, "batch_size", 1))
    return int(found) if isinstance(found, int | np.integer) else 1


def groups(model: Any, leave_out_normalization: bool = False) -> Groups:
    """Return what a model's compiled functions change, as checkpoints take it.

    Looks through the functions that are attributes of the model, or in lists that are, in the order of their names.  Of
    what they update, floats are the optimizer's: velocities, running averages.  Whole numbers are others, and so are
    numbers that are read: a learning rate.  What `Model.shown` has is no state: a step's cost, and its error.

    Parameters
    ----------
    model : instance
    leave_out_normalization : bool
        Whether parameters named ``gamma`` and ``beta`` stay each rank's own.

    Raises
    ------
    ContractError
        If that leaves no parameter to exchange.
    """
    excluded = [p for p in model.params if leave_out_normalization and p.name in ("gamma", "beta")]
    apart = {id(p) for p in excluded}
    found = Groups([p for p in model.params if id(p) not in apart], [], excluded, [], [])
    averages = getattr(model, "averages", None)
    if isinstance(averages, Mapping):  # of the base class, whose params end with them
        found.n_averages = sum(any(p is average for average in averages) for p in found.params)
    if not found.params:
        raise ContractError("params: expected some that are not named gamma or beta, which each rank keeps for itself")
    seen = {
        id(param) for param in (*model.params, *(getattr(model, "vels2", None) or ()), *getattr(model, "shown", ()))
    }
    for _, value in sorted(vars(model).items()):
        for function in value if isinstance(value, list | tuple) else [value]:
            _sort(function, found, seen)
    return found


def _sort(function: Any, found: Groups, seen: set[int]) -> None:
    """Sort the variables of a compiled function into groups; anything else has none."""
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
            found.generators.append(shared)
        elif not library.is_array(shared):
            continue
        elif entry.update is not None and np.dtype(shared.type.dtype).kind == "f":
            found.optimizer.append(shared)
        elif entry.update is not None or shared.type.ndim == 0:
            found.others.append(shared)


def learning_rate(model: Any) -> float | None:
    """Return a model's learning rate, if it has one under a usual name."""
    for name in ("shared_lr", "lr", "learning_rate"):
        value: Any = getattr(model, name, None)
        if hasattr(value, "get_value"):
            value = value.get_value()
        if value is not None and np.ndim(value) == 0:
            try:
                return float(value)
            except (TypeError, ValueError):
                continue
    return None
