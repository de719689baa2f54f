"""Synchronous exchange rules: a call of a rule's object is a collective of all workers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from synkhronos.exchange_rules.state import FlatVariables
from synkhronos.patching import restore_jax_precision
from synkhronos.platoon.channel.worker import Worker


class GlobalDynamics:
    """Base class of rules, and the rule of a user's function (`register_fn`)."""

    def __init__(self, worker: Worker | None = None):
        self._worker = worker
        self._fn: Callable[[], object] | None = None

    def __call__(self) -> None:
        """Exchange the variables of the rule with the other workers."""
        if self._fn is None:
            raise NotImplementedError(f"{type(self).__name__}: call make_rule() or register_fn() first")
        with restore_jax_precision():
            self._fn()

    @property
    def worker(self) -> Worker:
        """Worker whose collectives the rule calls."""
        if self._worker is None:
            self._worker = get_worker()
        return self._worker

    def register_fn(self, fun: Callable[[], object]) -> None:
        """Set the function that is called, without arguments, at each call of this object."""
        self._fn = fun

    def _all_reduce(self, vector: Any, average: bool = False) -> Any:
        """Return the sum, or the mean, of the workers' vectors."""
        if average and vector.dtype.kind not in "fc":
            raise TypeError(f"the mean of {vector.dtype} values is no {vector.dtype}: use SumSGD, or float variables")
        total = self.worker.all_reduce(vector, "sum")
        return total / vector.dtype.type(self.worker.global_size) if average else total


class SGD(GlobalDynamics):
    """Platoon's rule SGD: the workers' values become their sum, or with ``average`` their mean.

    The values may be updates or parameters.  The rule takes no step of gradient descent by itself.
    """

    def __init__(self, average: bool = False, worker: Worker | None = None):
        super().__init__(worker)
        self.average = average

    def make_rule(self, local_updates: Any) -> None:
        """Set up the rule for a shared variable, or a list of them, which an exchange sets to the sum or the mean."""
        vectors = _join_by_dtype(local_updates)

        def exchange() -> None:
            for (vector,) in vectors:
                vector.set(self._all_reduce(vector.get(), self.average))

        self._fn = exchange


SumSGD, AverageSGD = functools.partial(SGD, False), functools.partial(SGD, True)


class EASGD(GlobalDynamics):
    """Synchronous elastic averaging; every worker has a copy of the central variables."""

    def make_rule(self, local_particle: Any, central_particle: Any, alpha: float) -> None:
        """Set up the rule for shared variables, or lists of them.

        An exchange adds ``alpha * (central - local)`` to the local variable, and the sum of
        ``alpha * (local - central)`` over all workers to the central one.
        """
        vectors = _join_by_dtype(local_particle, central_particle)
        self.alpha = alpha

        def exchange() -> None:
            for local, central in vectors:
                value, center = local.get(), central.get()
                force = local.dtype.type(alpha) * (value - center)
                local.set(value - force)
                central.set(center + self._all_reduce(force))

        self._fn = exchange


class Downpour(GlobalDynamics):
    """Synchronous Downpour: the workers' accumulated updates are added to the global variables, which all then copy.

    With ``average``, the sum of updates is divided by the number of workers.
    """

    def __init__(self, average: bool = False, worker: Worker | None = None):
        super().__init__(worker)
        self.average = average

    def make_rule(self, local_particle: Any, local_acc_updates: Any, global_particle: Any) -> None:
        """Set up the rule for shared variables, or lists of them.

        An exchange adds the sum of ``local_acc_updates`` to ``global_particle``, copies this to ``local_particle``, and
        sets ``local_acc_updates`` to 0.
        """
        vectors = _join_by_dtype(local_particle, local_acc_updates, global_particle)

        def exchange() -> None:
            for local, updates, center in vectors:
                value = updates.get()
                new_value = center.get() + self._all_reduce(value, self.average)
                center.set(new_value)
                local.set(new_value)
                updates.set(np.zeros(value.shape, value.dtype))

        self._fn = exchange


#: Platoon's second name of `Downpour`: a synchronous rule, although ASGD means asynchronous SGD.  The asynchronous one
#: is `synkhronos.exchange_rules.ASGD`.
ASGD = Downpour


def get_worker() -> Worker:
    """Return the worker of this process; raise AttributeError if the script has not created it yet."""
    if Worker.instance is None:
        raise AttributeError("Worker instance has not been created yet.")
    worker: Worker = Worker.instance
    return worker


def _join_by_dtype(*groups: Any) -> list[list[FlatVariables]]:
    """Return the groups of variables as vectors: for each dtype, a vector of each group."""
    lists = [list(group) if isinstance(group, list | tuple) else [group] for group in groups]
    rows_by_dtype: dict[str, list[tuple[Any, ...]]] = {}
    for row in zip(*lists, strict=True):
        layouts = {(variable.dtype, variable.get_value(borrow=True).shape) for variable in row}
        if len(layouts) > 1:
            raise TypeError(f"make_rule: expected variables of one dtype and shape at each position, got {layouts}")
        rows_by_dtype.setdefault(row[0].dtype, []).append(row)
    return [[FlatVariables(column) for column in zip(*rows, strict=True)] for rows in rows_by_dtype.values()]
