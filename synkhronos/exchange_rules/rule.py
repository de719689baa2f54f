"""Base class of exchange rules, and reductions of parameter vectors that several rules share."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from synkhronos.checks import check_at_least, check_number
from synkhronos.data_objects import Data
from synkhronos.data_objects.data_access import create_unpublished
from synkhronos.devices import NUMPY, find_device
from synkhronos.exchange_rules.state import BATCHES_KEY, ExchangeState, concatenate
from synkhronos.programs import RankContext
from synkhronos.variable_types import Array, SharedVariable

#: Shapes and dtypes of a rule's arrays in shared memory, by name.
ArraySpecs = dict[str, tuple[tuple[int, ...], Any]]
#: Number of steps between two exchanges, or a function of the number of steps up to the last one that returns it.
Period = int | Callable[[int], int]
#: Predicate of a parameter: whether ranks do not exchange it.
Exclude = Callable[[SharedVariable], bool] | None
#: Dtypes in which parameters can be exchanged; None is their own dtype.
PRECISIONS = (None, "float32", "float16", "bfloat16")


class ExchangeRule:
    """Base class of exchange rules; :doc:`exchange_rules` has a subclass.  Its own `exchange` does nothing.

    Parameters
    ----------
    period : int or callable, optional
        Number of steps between two exchanges.  A callable is called with the number of steps taken up to the last
        exchange, 0 before the first, and returns the number of steps from there to the next exchange.  Each of its
        answers must always be the same.  The default is the class attribute.
    exclude : callable, optional
        Takes a parameter, a shared variable, and returns True if ranks do not exchange it.  For example, each rank may
        have its own parameters of batch normalization.
    precision : {None, "float32", "float16", "bfloat16"}
        Dtype in which ranks exchange; None: the dtype of the parameters.  With 16 bits, ranks exchange the changes of
        the parameters since the last exchange, because parameters rounded to 16 bits would lose small changes.

    Attributes
    ----------
    asynchronous : bool
        Whether each rank takes batches and exchanges at its own pace, without waiting for others.
    is_bulk_synchronous : bool
        Whether ranks are equal after every step, as under `BSP`.
    averages_gradients : bool
        Whether all ranks take the same steps by the mean of their gradients, as `BSP` does by default.  A trainer then
        calls no `exchange`.
    changeable_options : frozenset of str
        Names of the constructor's arguments that may change when a training run is resumed.
    """

    asynchronous: bool = False
    is_bulk_synchronous: bool = False
    averages_gradients: bool = False
    changeable_options: frozenset[str] = frozenset({"period"})
    period: Period = 1
    exclude: Exclude = None
    precision: str | None = None

    def __init__(self, period: Period | None = None, exclude: Exclude = None, precision: str | None = None):
        if period is not None:  # None leaves the class attribute
            self.period = period if callable(period) else check_period(period, "period")
        if exclude is not None and not callable(exclude):
            raise TypeError(f"exclude: expected a function of a shared variable, got {exclude!r}")
        self.exclude = exclude
        if precision not in PRECISIONS:
            raise ValueError(f"precision: expected one of {PRECISIONS}, got {precision!r}")
        self.precision = precision

    def __getstate__(self) -> dict[str, Any]:
        # Only the master needs this function, which may not be picklable.
        return {**self.__dict__, "exclude": None}

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.get_options().items())
        return f"{type(self).__name__}({options})"

    def get_options(self) -> dict[str, Any]:
        """Return the constructor's arguments by name, without None and callables, for records and checkpoints."""
        options = {name: getattr(self, name, None) for name in inspect.signature(type(self)).parameters}
        return {name: value for name, value in options.items() if value is not None and not callable(value)}

    # -- methods for subclasses to override ------------------------------------------------------------------

    def get_shared_array_specs(self, n_ranks: int, size: int, dtype: np.dtype) -> ArraySpecs:
        """Return the shapes and dtypes of the rule's arrays in shared memory, by name.

        The arrays are initially zero.  A rank reads and writes them in ``shared`` of its `ExchangeState`, under a
        `RankContext.lock`.  With several hosts each host has a copy, which the lock updates: its methods take entries
        of ``shared_rows`` of the `ExchangeState`.  ``size`` and ``dtype`` are those of `ExchangeState.vector`.
        """
        return {}

    def setup(self, context: RankContext, state: ExchangeState) -> None:
        """Initialize ``state.own`` and shared memory before the first step.  All ranks have equal parameters then."""
        if self.precision not in (None, "float32"):
            state.own["anchor"] = state.vector

    def exchange(self, context: RankContext, state: ExchangeState) -> Any:
        """Exchange parameters.  Each rank calls this after every `period` steps."""

    def compute_consensus(self, context: RankContext, state: ExchangeState) -> Array:
        """Return the parameters to validate, save and use after training, as a vector: by default the mean over ranks.

        A collective: all ranks call this after the same exchange.
        """
        return reduce_with_weighted_averages(state, state.vector, context.all_reduce)

    def resize_states(self, states: list[dict[str, Any]], n_ranks: int) -> list[dict[str, Any]]:
        """Convert the states of a checkpoint to another number of ranks.

        By default all ranks start from the means of the parameters and of the optimizer's variables.  Under a
        synchronous rule the new states must have equal numbers of steps, in all and since the last exchange: else a
        trainer starts from the mean of the ranks, and the launcher's ranks wait for each other in different places.

        Parameters
        ----------
        states : list of dict
            Saved state of each rank: ``params``, ``optimizer``, ``excluded``, ``own``, ``shared``, ``step``,
            ``steps_since_exchange``.
        n_ranks : int
            New number of ranks.

        Returns
        -------
        list of dict
        """
        first = states[0]
        means = {
            name: np.mean([state[name] for state in states], axis=0) for name in ("params", "optimizer", "excluded")
        }
        means = {name: mean.astype(first[name].dtype) for name, mean in means.items()}
        return [{**first, **means} for _ in range(n_ranks)]

    # -- for trainers and subclasses -------------------------------------------------------------------------

    def count_steps_left(self, state: ExchangeState) -> int:
        """Return the number of steps until the next exchange, at least 1."""
        step_of_exchange = state.step - state.steps_since_exchange
        period = self.period(step_of_exchange) if callable(self.period) else self.period
        return max(1, period - state.steps_since_exchange)

    def compute_mean(self, context: RankContext, state: ExchangeState, relative_weight: float = 1.0) -> Array:
        """Return the mean of the parameters over all ranks, as a vector.  A collective.

        Ranks' running averages are weighted by their numbers of rows since the last exchange.  ``relative_weight`` is
        the weight of this rank's parameters divided by the mean weight of all ranks.
        """

        def reduce(vector: Array) -> Array:
            return all_reduce_mean(context, vector, self.precision)

        if self.precision in (None, "float32"):
            return reduce_with_weighted_averages(
                state, _scale_parameters(state, state.vector, relative_weight), reduce, self.precision
            )
        anchor = state.own.get("anchor")
        if anchor is None:
            raise RuntimeError("setup() of a rule with 16-bit precision has to call super().setup()")
        mean = anchor + reduce_with_weighted_averages(
            state, _scale_parameters(state, state.vector - anchor, relative_weight), reduce, self.precision
        )
        state.own["anchor"] = mean
        return mean


def _scale_parameters(state: ExchangeState, vector: Array, relative_weight: float) -> Array:
    """Return a vector with its parameters multiplied by a weight, but not its running averages."""
    return (
        vector if relative_weight == 1 else state.replace_averages(vector * vector.dtype.type(relative_weight), vector)
    )


def allocate_shared_arrays(rule: ExchangeRule, n_ranks: int, size: int, dtype: np.dtype) -> dict[str, Data]:
    """Allocate the arrays of `ExchangeRule.get_shared_array_specs`, as zeros, for a program of `synkhronos.run`.

    The program passes them on as the argument ``shared`` of `ExchangeState`.  ``size`` and ``dtype`` are those of the
    parameters together.
    """
    layout = rule.get_shared_array_specs(n_ranks, size, dtype)
    return {name: create_unpublished(shape, item_dtype) for name, (shape, item_dtype) in layout.items()}


def reduce_with_weighted_averages(
    state: ExchangeState, vector: Array, reduce: Callable[[Array], Array], precision: str | None = None
) -> Array:
    """Reduce vectors over ranks in one collective, with running averages weighted by rows.

    The running averages, or changes of them, are the last ``state.n_average_items`` elements.  Their weights are the
    rows since the last exchange, or equal if no rank has had rows.  ``reduce`` takes a vector, and returns the mean or
    the sum over ranks, exchanged in ``precision``.
    """
    n = state.n_average_items
    if not n:
        return reduce(vector)
    # A rank without rows has a negligible weight.  The weight is a power of two, so products are exact.
    min_weight = 2.0**-14 if "float16" in (precision, vector.dtype.name) else 2.0**-64
    # Weights are at most 1, since the range of float16 is narrow.
    weight = max(state.own.get(BATCHES_KEY, 0.0) / max(1, state.steps_since_exchange), min_weight)
    weighted = concatenate(vector[:-n], vector[-n:] * weight, np.full(1, weight, vector.dtype))
    reduced = reduce(weighted.astype(vector.dtype))
    return concatenate(reduced[: -n - 1], reduced[-n - 1 : -1] / reduced[-1])


def all_reduce_mean(context: RankContext, vector: Array, precision: str | None) -> Array:
    """Return the mean of a vector over all ranks, in the vector's dtype.  A collective, which may overwrite the vector.

    Sums cannot overflow: vectors are divided before they are added, or are added in a wider dtype.  With ``precision``
    "bfloat16", ranks in host memory exchange float32 values rounded to bfloat16, and GPUs exchange 16 bits.
    """
    dtype = vector.dtype
    if precision is None or np.dtype(dtype).name == precision:
        return context.all_reduce(vector, overwrite=True)
    device = find_device(vector)
    if device is not NUMPY and device.can_transfer_directly(dtype):
        return context.all_reduce(vector.astype(precision), overwrite=True).astype(dtype)
    vector = device.to_numpy(vector)
    if precision == "bfloat16":
        return round_to_bfloat16(context.all_reduce(round_to_bfloat16(vector))).astype(dtype)
    return context.all_reduce(vector.astype(precision)).astype(dtype)


def round_to_bfloat16(vector: np.ndarray) -> np.ndarray:
    """Round finite numbers to bfloat16, to nearest with ties to even.  Return them as float32."""
    bits = np.ascontiguousarray(vector, np.float32).view(np.uint32)
    rounded = (bits + (((bits >> 16) & 1) + 0x7FFF).astype(np.uint32)) & np.uint32(0xFFFF0000)
    return rounded.view(np.float32)


def check_fraction(value: object, name: str) -> float:
    """Return a number in (0, 1].  Raise TypeError or ValueError for any other value."""
    checked = check_number(value, name)
    if not 0 < checked <= 1:
        raise ValueError(f"{name}: expected a number above 0, up to 1, got {value!r}")
    return checked


def check_momentum(value: object) -> float:
    """Return a number in [0, 1).  Raise TypeError or ValueError for any other value."""
    checked = check_number(value, "momentum")
    if not 0 <= checked < 1:
        raise ValueError(f"momentum: expected a number from 0, below 1, got {value!r}")
    return checked


def check_period(value: object, name: str) -> int:
    """Return a number of steps, at least 1.  Raise TypeError or ValueError for any other value."""
    return check_at_least(value, name, 1, "a number of steps")
