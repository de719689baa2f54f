"""Interface of model classes, equal to the interface of Theano-MPI's models.

A model class need not inherit from a class of this library.  Its methods and attributes are found by name, and checked
before the run.  Each method is called with the arguments that its signature accepts.
"""

from __future__ import annotations

import importlib
import inspect
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from synkhronos.graph_libraries import list_loaded_libraries
from synkhronos.patching import restore_jax_precision

if TYPE_CHECKING:
    from synkhronos.launcher.configuration.settings import Settings

#: Required methods, and the purpose of each in error messages.
REQUIRED_METHODS = {
    "compile_iter_fns": "compiles its functions",
    "train_iter": "takes a step; arguments (count, recorder)",
    "val_iter": "validates a batch; arguments (count, recorder)",
    "adjust_hyperp": "changes the learning rate after an epoch; argument (epoch)",
    "cleanup": "releases files, processes and other resources",
}


class ModelInterfaceError(TypeError):
    """A class lacks a method or an attribute that the launcher needs, or a method returns an invalid value."""


def check_interface(model: Any, name: str) -> None:
    """Raise `ModelInterfaceError` if a class lacks a method, or an instance a method or a valid attribute."""
    problems = _list_missing_methods(model) + ([] if isinstance(model, type) else _list_attribute_problems(model))
    if problems:
        raise ModelInterfaceError(f"{name}: missing or invalid:\n" + "\n".join(f"  {line}" for line in problems))


def _list_missing_methods(model: Any) -> list[str]:
    missing = [name for name in REQUIRED_METHODS if not callable(getattr(model, name, None))]
    return [f"method {name}(): {REQUIRED_METHODS[name]}" for name in missing]


def _list_attribute_problems(model: Any) -> list[str]:
    problems = []
    params = getattr(model, "params", None)
    if not isinstance(params, list | tuple) or not params:
        problems.append(f"attribute params: expected a list of shared variables, got {shorten_repr(params)}")
    else:
        for i, param in enumerate(params):
            if not any(library.is_shared(param) and library.is_array(param) for library in list_loaded_libraries()):
                problems.append(f"attribute params[{i}]: expected a shared variable, got {shorten_repr(param)}")
            elif np.dtype(param.type.dtype).kind != "f":
                problems.append(f"attribute params[{i}]: expected floats, got {param.type}")
        if not problems and len({id(param) for param in params}) != len(params):
            problems.append("attribute params: a shared variable is listed twice")
    data = getattr(model, "data", None)
    if data is None:
        problems.append("attribute data: expected an object with n_batch_train and n_batch_val, got None")
        return problems
    for name, minimum in (("n_batch_train", 1), ("n_batch_val", 0)):
        count = getattr(data, name, None)
        if not is_count(count, minimum):
            problems.append(
                f"attribute data.{name}: expected a number of batches, at least {minimum}, got {shorten_repr(count)}"
            )
    return problems


def is_count(value: Any, minimum: int) -> bool:
    """Whether a value is an integer of at least ``minimum``."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and bool(value >= minimum)


def shorten_repr(value: object) -> str:
    """Return the ``repr`` of a value on one line, cut to 60 characters, for an error message."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def import_model_class(pythonpath: str, module: str, class_name: str) -> Any:
    """Import the user's module, which may import others in its folder by name, and return the model class in it."""
    if pythonpath not in sys.path:
        sys.path.insert(0, pythonpath)
    module_folder = str(Path(pythonpath, *module.split(".")[:-1]))
    if module_folder not in sys.path:
        sys.path.append(module_folder)
    try:
        model_class = getattr(importlib.import_module(module), class_name, None)
    except ModuleNotFoundError as error:
        if error.name != "lasagne":
            raise
        raise ModelInterfaceError(f"{module} needs lasagne: pip install 'synkhronos[lasagne]'") from None
    if not isinstance(model_class, type):
        raise ModelInterfaceError(f"modelclass: {class_name!r} of {module}: expected a class, got {model_class!r}")
    return model_class


def make_config(settings: Settings, rank: int, size: int) -> dict[str, Any]:
    """Make the ``config`` of a rank's instance."""
    names = {"rank": rank, "size": size, "verbose": rank == 0, "seed": settings.seed, "mname": settings.modelclass}
    return {**names, **settings.config}


def make_instance(model_class: type, config: dict[str, Any]) -> Any:
    """Make an instance of a model class, whose constructor takes the config or no argument."""
    parameters = [p for p in inspect.signature(model_class).parameters.values() if p.kind is not p.VAR_KEYWORD]
    return model_class(config) if parameters else model_class()


def call_by_signature(method: Any, *arguments: Any, **keywords: Any) -> Any:
    """Call a method with the leading positional arguments and the keywords that its signature accepts."""
    parameters = inspect.signature(method).parameters.values()
    accepts_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    keywords = {key: value for key, value in keywords.items() if accepts_all or any(p.name == key for p in parameters)}
    n_positional = 0
    for parameter in parameters:
        if parameter.kind is parameter.VAR_POSITIONAL:
            n_positional = len(arguments)
        elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            n_positional += parameter.name not in keywords
    return method(*arguments[:n_positional], **keywords)


def call_optional(model: Any, name: str, *arguments: Any, **keywords: Any) -> Any:
    """Call a method with the arguments that its signature accepts, if the model has the method."""
    method = getattr(model, name, None)
    return call_by_signature(method, *arguments, **keywords) if callable(method) else None


def get_n_epochs(model: Any, settings: Settings) -> int:
    """Return the number of epochs in the settings, or else of the model.  Raise ModelInterfaceError if both lack it."""
    epochs = settings.epochs if settings.epochs is not None else getattr(model, "n_epochs", None)
    if not is_count(epochs, 1):
        raise ModelInterfaceError(
            f"{settings.modelclass}: missing or invalid:\n  attribute n_epochs: expected a number of epochs, got "
            f"{epochs!r}; or give --set epochs=N"
        )
    return int(epochs)  # type: ignore[arg-type]  # `is_count` has checked it


def get_steps_per_batch(model: Any) -> int:
    """Return the number of steps per batch: ``n_subb`` of the model, by default 1."""
    return max(1, int(getattr(model, "n_subb", 1)))


def parse_val_iter_result(result: Any, batch: int, next_batch: int) -> tuple[int, bool]:
    """Return the number of the next validation batch, and whether ``val_iter`` has ended the validation and the run.

    The next number is ``next_batch``, unless ``val_iter`` has returned another number above ``batch``.  Raise
    ModelInterfaceError if it has returned anything else than a number, None or "stop".

    Examples
    --------
    >>> [parse_val_iter_result(result, 3, 4) for result in (None, 7, "stop")]
    [(4, False), (7, False), (4, True)]
    """
    if result is None:
        return next_batch, False
    if isinstance(result, str) and result == "stop":
        return next_batch, True
    if isinstance(result, int | np.integer) and not isinstance(result, bool) and result > batch:
        return int(result), False
    raise ModelInterfaceError(
        f"val_iter(): expected it to return None, 'stop', or the number of the next batch, above {batch}, got "
        f"{shorten_repr(result)}"
    )


def get_batch_size(model: Any) -> int:
    """Return ``batch_size`` of the model or its data, or 1 without it; speed is then reported in batches."""
    size = getattr(model, "batch_size", getattr(model.data, "batch_size", 1))
    return int(size) if isinstance(size, int | np.integer) else 1


#: Names of a model's attribute that has the learning rate, in the order of preference.
LEARNING_RATE_NAMES = ("shared_lr", "lr", "learning_rate")


def get_learning_rate(model: Any) -> float:
    """Return the value of the model's ``shared_lr``, ``lr`` or ``learning_rate``, or NaN if the model has none."""
    for name in LEARNING_RATE_NAMES:
        value: Any = getattr(model, name, None)
        if hasattr(value, "get_value"):
            value = value.get_value()
        if value is not None and np.ndim(value) == 0:
            return float(value)
    return math.nan


@contextmanager
def use_model_precision() -> Iterator[None]:
    """Set JAX's precision, within a ``with`` block, to PyTensor's ``floatX``.  Models are compiled for it."""
    jax, pytensor = sys.modules.get("jax"), sys.modules.get("pytensor")
    with restore_jax_precision():
        if jax is not None and pytensor is not None:  # else nothing is compiled yet; PyTensor then sets the flag itself
            jax.config.update("jax_enable_x64", pytensor.config.floatX == "float64")
        yield
