"""Synchronous exchange rules: all workers call a rule's object at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from synkhronos.compat.platoon.channel.worker import Worker


class GlobalDynamics:
    """Base class of rules, and a rule for a function of one's own (`register_fn`).

    Parameters
    ----------
    worker : Worker, optional
        By default the worker of this process.
    """

    def __init__(self, worker: Worker | None = None):
        self._worker: Worker | None = None
        if worker is not None:
            self.worker = worker
        self._fn: Callable[[], object] | None = None

    def __call__(self) -> None:
        """Exchange.

        Raises
        ------
        NotImplementedError
            If neither `make_rule` nor `register_fn` was called.
        """
        if self._fn is None:
            raise NotImplementedError(f"{type(self).__name__}: call make_rule() or register_fn() first")
        self._fn()

    @property
    def worker(self) -> Worker:
        """The worker whose collectives the rule calls."""
        if self._worker is None:
            self._worker = existing_worker()
        return self._worker

    @worker.setter
    def worker(self, worker: Worker) -> None:
        if not isinstance(worker, Worker):
            raise TypeError(f"worker: expected a platoon Worker, got {worker!r}")
        self._worker = worker

    def register_fn(self, fun: Callable[[], object]) -> None:
        """Set the function that a call of this object calls, without arguments."""
        if not callable(fun):
            raise TypeError(f"fun: expected a function, got {fun!r}")
        self._fn = fun

    def make_rule(self, *args: Any) -> None:
        """Set up the rule for shared variables."""
        raise NotImplementedError(f"{type(self).__name__} has no make_rule()")

    def _sum(self, value: Any) -> Any:
        return self.worker.all_reduce(value, "sum")


class _Rule(GlobalDynamics):
    def register_fn(self, fun: Callable[[], object]) -> None:
        """Refuse: the rule has a function of its own."""
        raise AttributeError(f"{type(self).__name__} has a function of its own: call make_rule()")


class SGD(_Rule):
    """Sum or mean of the workers' values.

    Parameters
    ----------
    average : bool
        Whether sums are divided by the number of workers.
    worker : Worker, optional
    """

    def __init__(self, average: bool = False, worker: Worker | None = None):
        super().__init__(worker)
        self.average = average

    def make_rule(self, local_updates: Any) -> None:
        """Set up the rule.

        Parameters
        ----------
        local_updates : shared variable, or list of shared variable
            Each gets the sum, or the mean, of the workers' values.
        """
        variables = _as_list(local_updates)

        def exchange() -> None:
            for variable in variables:
                total = self._sum(_value(variable))
                variable.set_value(_divided(total, self.worker.global_size) if self.average else total)

        self._fn = exchange


def SumSGD(worker: Worker | None = None) -> SGD:  # noqa: N802 - Platoon's name
    """Return the rule that sums."""
    return SGD(False, worker)


def AverageSGD(worker: Worker | None = None) -> SGD:  # noqa: N802
    """Return the rule that averages."""
    return SGD(True, worker)


class EASGD(_Rule):
    """Synchronous elastic averaging: every worker has a copy of the central variables."""

    def make_rule(self, local_particle: Any, central_particle: Any, alpha: float) -> None:
        """Set up the rule.

        Parameters
        ----------
        local_particle, central_particle : shared variable, or list of shared variable
            In an exchange each local variable moves by ``alpha * (central - local)``, and the central one by the sum of
            the opposite over all workers.
        alpha : float
        """
        pairs = list(zip(_as_list(local_particle), _as_list(central_particle), strict=True))
        self.alpha = alpha

        def exchange() -> None:
            for local, central in pairs:
                value, center = _value(local), _value(central)
                force = value.dtype.type(alpha) * (value - center)
                local.set_value(value - force)
                central.set_value(center + self._sum(force))

        self._fn = exchange


class Downpour(_Rule):
    """Synchronous Downpour: the workers' accumulated updates go to the global variables, where all go on from.

    Parameters
    ----------
    average : bool
        Whether the sum of updates is divided by the number of workers.
    worker : Worker, optional
    """

    def __init__(self, average: bool = False, worker: Worker | None = None):
        super().__init__(worker)
        self.average = average

    def make_rule(self, local_particle: Any, local_acc_updates: Any, global_particle: Any) -> None:
        """Set up the rule.

        Parameters
        ----------
        local_particle, local_acc_updates, global_particle : shared variable, or list of shared variable
            In an exchange the sum of ``local_acc_updates`` is added to ``global_particle``, whose value
            ``local_particle`` gets; ``local_acc_updates`` becomes 0.
        """
        triples = list(
            zip(_as_list(local_particle), _as_list(local_acc_updates), _as_list(global_particle), strict=True)
        )

        def exchange() -> None:
            for local, updates, center in triples:
                value = _value(updates)
                total = self._sum(value)
                new = _value(center) + (_divided(total, self.worker.global_size) if self.average else total)
                center.set_value(new)
                local.set_value(new)
                updates.set_value(np.zeros(value.shape, value.dtype))

        self._fn = exchange


#: Downpour is the synchronous form of asynchronous SGD.
ASGD = Downpour


def existing_worker() -> Worker:
    """Return the worker of this process.

    Raises
    ------
    AttributeError
        If the program has not created it yet.
    """
    if Worker.instance is None:
        raise AttributeError("Worker instance has not been created yet.")
    found: Worker = Worker.instance
    return found


def _as_list(variables: Any) -> list[Any]:
    return list(variables) if isinstance(variables, list | tuple) else [variables]


def _value(variable: Any) -> Any:
    """Return a shared variable's array on the device where it lies, which may be its own memory."""
    return variable.get_value(borrow=True, return_internal_type=True)


def _divided(total: Any, size: int) -> Any:
    """Divide in the array's own dtype."""
    if total.dtype.kind not in "fc":
        raise TypeError(f"the mean of {total.dtype} values is not {total.dtype}: use SumSGD, or float variables")
    return total / total.dtype.type(size)
