"""Base class of exchange rules, and reductions of parameter vectors that several rules share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import synkhronos as synk
from synkhronos.checks import check_at_least, check_number
from synkhronos.data import Data
from synkhronos.data.shared import create_unpublished
from synkhronos.devices import HOST, find_device
from synkhronos.rules.state import State, concatenate
from synkhronos.tasks import Worker

#: Dtypes in which parameters can be exchanged; None is their own dtype.
PRECISIONS = (None, "float32", "float16", "bfloat16")


class Rule:
    """Base class of exchange rules; by itself it exchanges nothing.

    A subclass overrides `exchange`, and other methods as needed:

    .. code-block:: python

        class Halfway(rules.Rule):
            "Moves each rank half-way to the mean every 5 steps."

            period = 5

            def exchange(self, worker, state):
                state.vector = 0.5 * (state.vector + worker.all_reduce(state.vector))

    Parameters
    ----------
    period : int or callable, optional
        Number of steps between two exchanges.  A callable takes the number of steps so far and returns this number.
        The default is the class attribute.
    exclude : callable, optional
        Takes a parameter, a shared variable, and returns whether it is not exchanged, as for batch normalisation.
    precision : {None, "float32", "float16", "bfloat16"}
        Dtype in which ranks exchange; None is the parameters' dtype.  In 16 bits ranks exchange the changes since they
        were last equal, because small changes of the parameters themselves would be rounded away.

    Attributes
    ----------
    asynchronous : bool
        Whether each rank takes batches and exchanges at its own pace, without waiting for others.

    Raises
    ------
    TypeError, ValueError
        For wrong arguments.
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
        if period is not None:  # else the class attribute applies
            self.period = period if callable(period) else check_period(period, "period")
        if exclude is not None and not callable(exclude):
            raise TypeError(f"exclude: expected a function of a shared variable, got {exclude!r}")
        self.exclude = exclude
        if precision not in PRECISIONS:
            raise ValueError(f"precision: expected one of {PRECISIONS}, got {precision!r}")
        self.precision = precision

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "exclude": None, "_run": None}  # used in the master only; may not be picklable

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.options().items())
        return f"{type(self).__name__}({options})"

    def options(self) -> dict[str, Any]:
        """Return the constructor's arguments for records, without those that are None or callables."""
        options = {name: getattr(self, name, None) for name in inspect.signature(type(self)).parameters}
        return {name: value for name, value in options.items() if value is not None and not callable(value)}

    # -- methods for subclasses to override ------------------------------------------------------------------

    def memory(self, n_ranks: int, size: int, dtype: np.dtype) -> dict[str, tuple[tuple[int, ...], Any]]:
        """Return the arrays that the rule needs in shared memory, as ``{name: (shape, dtype)}``.

        The arrays start as zeros, and are in ``shared`` of `State`.  Ranks access them under a
        `synkhronos.tasks.Worker.lock`, which takes ``rows`` of `State`; each host has a copy, which the lock updates.

        Parameters
        ----------
        n_ranks : int
        size : int
            Number of elements of `State.vector`.
        dtype : dtype
            Dtype of `State.vector`.
        """
        return {}

    def setup(self, worker: Worker, state: State) -> None:
        """Initialise ``state.own`` and shared memory, before the first step; all ranks' parameters are equal."""
        if self.precision not in (None, "float32"):
            state.own["anchor"] = state.vector

    def exchange(self, worker: Worker, state: State) -> Any:
        """Exchange parameters; called on each rank after each `period` steps."""

    def report(self, worker: Worker, state: State) -> Any:
        """Return the vector of parameters to validate, and to use after training; by default the mean over ranks.

        All ranks call this together, with no exchange pending.
        """
        return reduce_by_rows(state, state.vector, worker.all_reduce)

    def resized(self, ranks: list[dict[str, Any]], size: int) -> list[dict[str, Any]]:
        """Convert the states of a checkpoint to another number of ranks.

        By default all ranks start from the means of the parameters and of the optimizer's variables.

        Parameters
        ----------
        ranks : list of dict
            Saved state of each rank: ``params``, ``optimizer``, ``excluded``, ``own``, ``shared``, ``step``, ``since``.
        size : int
            New number of ranks.

        Returns
        -------
        list of dict
            State of each of the ``size`` ranks.
        """
        first = ranks[0]
        means = {
            name: np.mean([saved[name] for saved in ranks], axis=0) for name in ("params", "optimizer", "excluded")
        }
        means = {name: mean.astype(first[name].dtype) for name, mean in means.items()}
        return [{**first, **means} for _ in range(size)]

    # -- training by the launcher ----------------------------------------------------------------------------

    def init(
        self,
        devices: Sequence[str] | str | None = None,
        modelfile: str = "",
        modelclass: str = "",
        **settings: Any,
    ) -> None:
        """Start training a model class by this rule in new processes, and return; `wait` waits for them.

        Parameters
        ----------
        devices : list of str, optional
            Device of each rank: ``cpu``, or ``cuda0``, ``gpu0`` and so on.
        modelfile, modelclass : str
            Module, such as ``models.mlp`` or ``models/mlp.py``, and the class in it.
        **settings
            Other settings of a session file: ``folder``, ``epochs``, ``config`` and so on.

        Raises
        ------
        SettingsError
            If a setting is wrong.  No process has been started then.
        RuntimeError
            If a run has been started already.

        Examples
        --------
        .. code-block:: python

            rule = rules.BSP()
            rule.init(devices=["cuda0", "cuda1"], modelfile="models.mlp", modelclass="MLP", epochs=10)
            folder = rule.wait()
        """
        if self._run is not None:
            raise RuntimeError("init() was called already: call wait(), or make another rule")
        self._run = synk.start_run(self, devices, modelfile, modelclass, **settings)

    def wait(self) -> Any:
        """Wait for the run that `init` has started, and return its folder.

        Raises
        ------
        RuntimeError
            If the run has failed, or `init` was not called.
        """
        if self._run is None:
            raise RuntimeError("wait(): expected a call of init() before it")
        run, self._run = self._run, None
        return run.wait()

    # -- for trainers and subclasses -------------------------------------------------------------------------

    def count_steps_left(self, state: State) -> int:
        """Return the number of steps until the next exchange, at least 1."""
        period = self.period(state.step) if callable(self.period) else self.period
        return max(1, period - state.since)

    def mean(self, worker: Worker, state: State, factor: float = 1.0) -> Any:
        """Return the mean of all ranks' parameters.  A collective.

        Running averages are weighted by the rows since the last exchange.

        Parameters
        ----------
        worker : Worker
        state : State
        factor : float
            Weight of this rank's parameters divided by the mean weight of all ranks.

        Returns
        -------
        array
            Of the shape of `State.vector`.

        Raises
        ------
        RuntimeError
            If the precision has 16 bits, and a subclass's `setup` has not called that of `Rule`.
        """

        def reduce(vector: Any) -> Any:
            return average(worker, vector, self.precision)

        if self.precision in (None, "float32"):
            return reduce_by_rows(state, _scale_parameters(state, state.vector, factor), reduce, self.precision)
        anchor = state.own.get("anchor")
        if anchor is None:
            raise RuntimeError("setup() of a rule with 16-bit precision has to call super().setup()")
        mean = anchor + reduce_by_rows(
            state, _scale_parameters(state, state.vector - anchor, factor), reduce, self.precision
        )
        state.own["anchor"] = mean
        return mean


def _scale_parameters(state: State, vector: Any, factor: float) -> Any:
    """Return a vector whose parameters, but not its running averages, are multiplied by a factor."""
    return vector if factor == 1 else state.with_averages(vector * vector.dtype.type(factor), vector)


def shared_memory(rule: Rule, n_ranks: int, size: int, dtype: np.dtype) -> dict[str, Data]:
    """Allocate the arrays of `Rule.memory`, as zeros, for a program that `synkhronos.run` starts.

    Parameters
    ----------
    rule : Rule
    n_ranks : int
    size : int
        Number of elements of the parameters.
    dtype : dtype
        Dtype of the parameters.

    Returns
    -------
    dict of str to Data
        Argument of the program, which passes it to `State` as ``shared``.

    Raises
    ------
    MemoryError
        If ``/dev/shm`` has too little space.

    Examples
    --------
    .. code-block:: python

        memory = rules.shared_memory(rule, n_ranks=2, size=1000, dtype=np.dtype("float32"))
        synk.run(program, rule, params, memory)
    """
    memory = rule.memory(n_ranks, size, dtype)
    return {name: create_unpublished(shape, item_dtype) for name, (shape, item_dtype) in memory.items()}


def reduce_by_rows(state: State, vector: Any, reduce: Callable[[Any], Any], precision: str | None = None) -> Any:
    """Reduce vectors over ranks in one collective, with running averages weighted by rows.

    Parameters
    ----------
    state : State
    vector : array
        This rank's vector.  Its last ``state.average_size`` elements are running averages, or changes of them.
    reduce : callable
        Takes a vector, and returns the mean or the sum over ranks.
    precision : str, optional
        Dtype in which ``reduce`` exchanges vectors.

    Returns
    -------
    array
        Result of ``reduce`` for the parameters.  Running averages are means over ranks, weighted by the rows since the
        last exchange, or equally if no rank has had rows.
    """
    n = state.average_size
    if not n:
        return reduce(vector)
    # Weight of a rank without rows: negligible next to any number of rows.  A power of two, so products are exact.
    least = 2.0**-14 if "float16" in (precision, vector.dtype.name) else 2.0**-64
    # At most 1, for the narrow range of float16.
    weight = max(state.own.get("batches", 0.0) / max(1, state.since), least)
    sent = concatenate(vector[:-n], vector[-n:] * weight, np.full(1, weight, vector.dtype))
    reduced = reduce(sent.astype(vector.dtype))
    return concatenate(reduced[: -n - 1], reduced[-n - 1 : -1] / reduced[-1])


def average(worker: Worker, vector: Any, precision: str | None) -> Any:
    """Return the mean of a vector over all ranks.  A collective.

    No sum overflows: vectors are divided before they are added, or are added in a wider dtype.

    Parameters
    ----------
    worker : Worker
    vector : array
        May be overwritten.
    precision : str or None
        Dtype in which values are exchanged; None is the vector's.  In host memory "bfloat16" exchanges float32 values
        that are rounded to it; GPUs exchange 16 bits.

    Returns
    -------
    array
        Of the vector's dtype.
    """
    dtype = vector.dtype
    if precision is None or np.dtype(dtype).name == precision:
        return worker.all_reduce(vector, overwrite=True)
    device = find_device(vector)
    if device is not HOST and device.can_communicate(dtype):
        return worker.all_reduce(vector.astype(precision), overwrite=True).astype(dtype)
    vector = device.to_host(vector)
    if precision == "bfloat16":
        return as_bfloat16(worker.all_reduce(as_bfloat16(vector))).astype(dtype)
    return worker.all_reduce(vector.astype(precision)).astype(dtype)


def as_bfloat16(vector: np.ndarray) -> np.ndarray:
    """Return float32 values rounded to bfloat16, to nearest with ties to even; for finite numbers."""
    bits = np.ascontiguousarray(vector, np.float32).view(np.uint32)
    rounded = (bits + (((bits >> 16) & 1) + 0x7FFF).astype(np.uint32)) & np.uint32(0xFFFF0000)
    return rounded.view(np.float32)


def check_fraction(value: Any, name: str) -> float:
    """Return a number in (0, 1]; raise TypeError or ValueError."""
    checked = check_number(value, name)
    if not 0 < checked <= 1:
        raise ValueError(f"{name}: expected a number above 0, up to 1, got {value!r}")
    return checked


def check_momentum(value: Any) -> float:
    """Return a number in [0, 1); raise TypeError or ValueError."""
    checked = check_number(value, "momentum")
    if not 0 <= checked < 1:
        raise ValueError(f"momentum: expected a number from 0, below 1, got {value!r}")
    return checked


def check_period(value: Any, name: str) -> int:
    """Return a number of steps, at least 1; raise TypeError or ValueError."""
    return check_at_least(value, name, 1, "a number of steps")
