"""What rules have in common.

`Rule`
    A rule does nothing: ranks train on their own.
`shared_memory`
    What a rule asks for that all ranks see.
`by_rows`
    A reduction in which running averages count by their rows.
`average`
    The mean of all ranks' vectors, in one precision or another.
`check_share`, `check_momentum`, `check_period`
    Refuse wrong options.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from synkhronos.checks import at_least, number
from synkhronos.data import Data, data
from synkhronos.devices import JAX
from synkhronos.rules.state import State, concatenate
from synkhronos.tasks import Worker

#: The precisions in which parameters can be exchanged; None is their own.
PRECISIONS = (None, "float32", "float16", "bfloat16")


class Rule:
    """How ranks that train exchange their parameters; this base class does nothing.

    A rule of your own overrides `exchange`, and other methods where it needs to:

    .. code-block:: python

        class Halfway(rules.Rule):
            "Every 5 steps each rank goes half-way to the mean."

            period = 5

            def exchange(self, worker, state):
                state.vector = 0.5 * (state.vector + worker.all_reduce(state.vector))

    Parameters
    ----------
    period : int or callable, optional
        The number of steps between two exchanges; a callable gets the number of steps taken, and returns this number.
        By default that of the class.
    exclude : callable, optional
        Returns whether a parameter, a shared variable, stays each rank's own, as those of batch normalisation may.
    precision : {None, "float32", "float16", "bfloat16"}
        The dtype in which ranks exchange; None is the parameters' own.  In 16 bits ranks exchange how far they have
        come since they were last the same, not the parameters, whose small steps would be lost.

    Attributes
    ----------
    asynchronous : bool
        Whether each rank exchanges whenever it is ready.  Then no rank waits for another, and each fetches its next
        batch when it is ready.
    """

    asynchronous: bool = False
    period: int | Callable[[int], int] = 1
    exclude: Callable[[Any], bool] | None = None
    precision: str | None = None
    _run: Any = None

    def __init__(
        self,
        period: int | Callable[[int], int] | None = None,
        exclude: Callable[[Any], bool] | None = None,
        precision: str | None = None,
    ):
        if period is not None:  # else what the class says
            self.period = period if callable(period) else check_period(period, "period")
        if exclude is not None and not callable(exclude):
            raise TypeError(f"exclude: expected a function of a shared variable, got {exclude!r}")
        self.exclude = exclude
        if precision not in PRECISIONS:
            raise ValueError(f"precision: expected one of {PRECISIONS}, got {precision!r}")
        self.precision = precision

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "exclude": None, "_run": None}  # asked in the master alone

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.options().items())
        return f"{type(self).__name__}({options})"

    def options(self) -> dict[str, Any]:
        """Return what the rule was made with, for records; functions are left out."""
        found = {name: getattr(self, name, None) for name in inspect.signature(type(self)).parameters}
        return {name: value for name, value in found.items() if value is not None and not callable(value)}

    # -- what a rule of your own may override ----------------------------------------------------------------

    def memory(self, n_ranks: int, size: int, dtype: np.dtype) -> dict[str, tuple[tuple[int, ...], Any]]:
        """Return shape and dtype of each array that all ranks have to see, by name: see ``shared`` of `State`.

        On several hosts each has its own, of zeros at first.  Ranks see what others have written under a lock: see
        `synkhronos.tasks.Worker.lock`, to which ``rows`` of `State` are given.
        """
        return {}

    def setup(self, worker: Worker, state: State) -> None:
        """Begin: all ranks have the same parameters."""
        if self.precision not in (None, "float32"):
            state.own["anchor"] = state.vector

    def exchange(self, worker: Worker, state: State) -> Any:
        """Exchange parameters, after the steps that `period` says."""

    def report(self, worker: Worker, state: State) -> Any:
        """Return the parameters that stand for all ranks' at a report: those to validate, and to use in the end.

        All ranks come here at once, with nothing under way.
        """
        return by_rows(state, state.vector, worker.all_reduce)

    def resized(self, ranks: list[dict[str, Any]], size: int) -> list[dict[str, Any]]:
        """Return what each of another number of ranks starts with, from what the former ranks had.

        Each has ``params``, ``optimizer``, ``own``, ``step`` and ``since``.  By default all start from the means of
        parameters and of the optimizer's variables.
        """
        first = ranks[0]
        means = {name: np.mean([each[name] for each in ranks], axis=0) for name in ("params", "optimizer", "excluded")}
        means = {name: mean.astype(first[name].dtype) for name, mean in means.items()}
        return [{**first, **means} for _ in range(size)]

    # -- a run of its own ------------------------------------------------------------------------------------

    def init(
        self,
        devices: Sequence[str] | str | None = None,
        modelfile: str = "",
        modelclass: str = "",
        **settings: Any,
    ) -> None:
        """Start to train a class by this rule, in processes of its own; `wait` waits for them.

        Parameters
        ----------
        devices : list of str, optional
            One for each rank: ``cuda0`` or ``gpu0`` and so on, or ``cpu``.
        modelfile, modelclass : str
            The module, ``models.mlp`` or ``models/mlp.py``, and the class in it.
        **settings
            Others of a session file: ``folder``, ``epochs``, ``config`` and so on.

        Raises
        ------
        SettingsError
            If one of them is wrong; nothing has started then.
        """
        from synkhronos.launch.handle import Run  # it stands above the rules

        if self._run is not None:
            raise RuntimeError("init() was called already: call wait(), or make another rule")
        self._run = Run(self, devices, modelfile, modelclass, **settings)

    def wait(self) -> Any:
        """Wait for the run that `init` has started, and return the run's folder.

        Raises
        ------
        RuntimeError
            If the run has failed.
        """
        if self._run is None:
            raise RuntimeError("wait(): expected a call of init() before it")
        run, self._run = self._run, None
        return run.wait()

    # -- what the trainer asks -------------------------------------------------------------------------------

    def left(self, state: State) -> int:
        """Return how many steps there are until the next exchange."""
        period = self.period(state.step) if callable(self.period) else self.period
        return max(1, period - state.since)

    def mean(self, worker: Worker, state: State, factor: float = 1.0) -> Any:
        """Return the mean of all ranks' parameters: of running averages, by the rows since the last exchange.

        ``factor`` is this rank's weight divided by the mean weight of all ranks.
        """

        def reduce(vector: Any) -> Any:
            return average(worker, vector, self.precision)

        if self.precision in (None, "float32"):
            return by_rows(state, _scaled(state, state.vector, factor), reduce, self.precision)
        anchor = state.own.get("anchor")
        if anchor is None:
            raise RuntimeError("a rule that exchanges in 16 bits has to call super().setup() in its own setup()")
        mean = anchor + by_rows(state, _scaled(state, state.vector - anchor, factor), reduce, self.precision)
        state.own["anchor"] = mean
        return mean


def _scaled(state: State, vector: Any, factor: float) -> Any:
    """Multiply the parameters of a vector, but not its running averages."""
    return vector if factor == 1 else state.with_averages(vector * vector.dtype.type(factor), vector)


def shared_memory(rule: Rule, n_ranks: int, size: int, dtype: np.dtype) -> dict[str, Data]:
    """Return the memory that a rule asks for, of zeros: arguments of a program, in which a `State` takes it.

    Raises
    ------
    MemoryError
        If there is no room in ``/dev/shm``.
    """
    memory = {
        name: data(shape=shape, dtype=dtype) for name, (shape, dtype) in rule.memory(n_ranks, size, dtype).items()
    }
    for each in memory.values():
        each._is_published = False
    return memory


def by_rows(state: State, vector: Any, reduce: Callable[[Any], Any], precision: str | None = None) -> Any:
    """Reduce ranks' vectors, whose running averages become means by rows, in one collective.

    Parameters
    ----------
    state : State
    vector : array
        This rank's, whose last ``state.averages`` elements are running averages, or their changes.
    reduce : callable
        Takes a vector; returns the mean or the sum of all ranks'.
    precision : str, optional
        The dtype in which `reduce` exchanges vectors.

    Returns
    -------
    array
        What `reduce` returns, but for the running averages.  Each counts by its rank's rows since the last exchange,
        or equally where no rank has had any.
    """
    n = state.averages
    if not n:
        return reduce(vector)
    # Powers of two that vanish beside any number of rows: what they multiply is not rounded.
    least = 2.0**-14 if "float16" in (precision, vector.dtype.name) else 2.0**-64
    # Numbers up to 1, for the narrow range of float16.
    weight = max(state.own.get("batches", 0.0) / max(1, state.since), least)
    sent = concatenate(vector[:-n], vector[-n:] * weight, np.full(1, weight, vector.dtype))
    reduced = reduce(sent.astype(vector.dtype))
    return concatenate(reduced[: -n - 1], reduced[-n - 1 : -1] / reduced[-1])


def average(worker: Worker, vector: Any, precision: str | None) -> Any:
    """Return the mean of all ranks' vectors, exchanged in a precision.

    No sum overflows: vectors are divided before they are added, or are added in a wider dtype.
    The vector's memory may be overwritten.  In host memory bfloat16 is a rounding of float32, which is what moves;
    between GPUs 16 bits move.
    """
    dtype = vector.dtype
    if precision is None or np.dtype(dtype).name == precision:
        return worker.all_reduce(vector, overwrite=True)
    if JAX.holds(vector) and JAX.communicates(dtype):
        return worker.all_reduce(vector.astype(precision), overwrite=True).astype(dtype)
    vector = np.asarray(vector)
    if precision == "bfloat16":
        return as_bfloat16(worker.all_reduce(as_bfloat16(vector))).astype(dtype)
    return worker.all_reduce(vector.astype(precision)).astype(dtype)


def as_bfloat16(vector: np.ndarray) -> np.ndarray:
    """Round finite numbers to float32 whose last 16 bits are 0: the nearest, or of two as near the even one."""
    bits = np.ascontiguousarray(vector, np.float32).view(np.uint32)
    rounded = (bits + (((bits >> 16) & 1) + 0x7FFF).astype(np.uint32)) & np.uint32(0xFFFF0000)
    return rounded.view(np.float32)


def check_share(value: Any, name: str) -> float:
    """Refuse what is no number above 0, up to 1."""
    checked = number(value, name)
    if not 0 < checked <= 1:
        raise ValueError(f"{name}: expected a number above 0, up to 1, got {value!r}")
    return checked


def check_momentum(value: Any) -> float:
    """Refuse what is no number from 0 up to, but not including, 1."""
    checked = number(value, "momentum")
    if not 0 <= checked < 1:
        raise ValueError(f"momentum: expected a number from 0, below 1, got {value!r}")
    return checked


def check_period(value: Any, name: str) -> int:
    """Refuse what is no number of steps."""
    return at_least(value, name, 1, "a number of steps")
