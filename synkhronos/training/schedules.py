"""Schedules of the learning rate.

A schedule is a callable: it takes the number of epochs trained so far, a float, and returns the learning rate.  Any
function that the ranks can import is also a schedule.  `plateau` also observes validation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from synkhronos.checks import check_at_least, check_number, check_positive, is_number

Schedule = Callable[[float], float]


def _check_range(value: object, name: str, maximum: float) -> float:
    """Return a number from 0 to a maximum.  Raise TypeError or ValueError for any other value."""
    checked = check_number(value, name)
    if not 0 <= checked <= maximum:
        raise ValueError(f"{name}: expected a number from 0 to {maximum:g}, got {value!r}")
    return checked


def get_state(schedule: Schedule) -> dict[str, Any]:
    """Return the state of `plateau`, also within other schedules, for a checkpoint; empty for other schedules."""
    base = _find_plateau(schedule)
    if base is None:
        return {}
    best = {} if math.isinf(base.best) else {"best": base.best}
    return {"identity": base._identity, "rate": base.rate, "n_bad_reports": base.n_bad_reports, **best}


def set_state(schedule: Schedule, state: Mapping[str, Any]) -> None:
    """Restore a state from `get_state`.  Do nothing if its schedule had another class or initial rate."""
    base = _find_plateau(schedule)
    if base is not None and state.get("identity") == base._identity:
        base.rate, base.n_bad_reports = state["rate"], state["n_bad_reports"]
        base.best = state.get("best", math.inf)


def reset_best(schedule: Schedule) -> None:
    """Reset the best value of `plateau`, before it observes another quantity.  Its rate is unchanged."""
    base = _find_plateau(schedule)
    if base is not None:
        base.best, base.n_bad_reports = math.inf, 0


def _find_plateau(schedule: Any) -> plateau | None:
    while hasattr(schedule, "schedule"):
        schedule = schedule.schedule
    return schedule if isinstance(schedule, plateau) else None


def as_schedule(value: Schedule | float) -> Schedule:
    """Return a schedule, or for a number the constant one."""
    return value if callable(value) else constant(value)


def compute_rate(schedule: Schedule, epoch: float) -> float:
    """Return a schedule's learning rate at an epoch.  Raise TypeError or ValueError if it is not a finite number."""
    rate = schedule(epoch)
    if not is_number(rate) or not math.isfinite(rate):
        error_type = ValueError if is_number(rate) else TypeError
        raise error_type(
            f"learning_rate: expected a schedule that returns a finite number, got {rate!r} for epoch {epoch:g}"
        )
    return float(rate)


@dataclass
class constant:  # noqa: N801 - users call them like functions
    """A constant learning rate."""

    rate: float

    def __post_init__(self) -> None:
        self.rate = check_positive(self.rate, "learning_rate")

    def __call__(self, epoch: float) -> float:
        """Return the learning rate."""
        return self.rate


@dataclass
class steps:  # noqa: N801
    """A learning rate that is multiplied at some epochs.

    Parameters
    ----------
    rate : float
        The initial rate.
    factors : dict of float to float
        For each epoch the factor that multiplies the rate from then on; factors accumulate.

    Examples
    --------
    >>> schedule = steps(0.1, {30: 0.1, 60: 0.1})
    >>> schedule(0), round(schedule(30), 6), round(schedule(75), 6)
    (0.1, 0.01, 0.001)
    """

    rate: float
    factors: Mapping[float, float]

    def __post_init__(self) -> None:
        self.rate = check_positive(self.rate, "rate")
        if not isinstance(self.factors, Mapping):
            raise TypeError(f"factors: expected a dict from an epoch to a factor, got {self.factors!r}")
        self.factors = {float(epoch): check_positive(factor, "factors") for epoch, factor in dict(self.factors).items()}

    def __call__(self, epoch: float) -> float:
        """Return the learning rate."""
        return self.rate * math.prod(factor for start, factor in self.factors.items() if epoch >= start)


@dataclass
class cosine:  # noqa: N801
    """A learning rate that falls along half a cosine, from ``rate`` to ``min_rate`` after ``epochs`` epochs.

    Examples
    --------
    >>> schedule = cosine(0.1, epochs=10)
    >>> schedule(0), round(schedule(5), 6), schedule(10)
    (0.1, 0.05, 0.0)
    """

    rate: float
    epochs: float
    min_rate: float = 0.0

    def __post_init__(self) -> None:
        self.rate, self.epochs = check_positive(self.rate, "rate"), check_positive(self.epochs, "epochs")
        self.min_rate = _check_range(self.min_rate, "min_rate", self.rate)

    def __call__(self, epoch: float) -> float:
        """Return the learning rate."""
        fraction = min(1.0, epoch / self.epochs)
        return self.min_rate + (self.rate - self.min_rate) * (1 + math.cos(math.pi * fraction)) / 2


@dataclass
class _ScheduleWrapper:
    """A schedule that changes the rates of another one."""

    schedule: Any  # a schedule, or a number

    def __post_init__(self) -> None:
        self.schedule = as_schedule(self.schedule)

    def observe(self, value: float) -> None:
        """Pass a value of validation on to the wrapped schedule."""
        if hasattr(self.schedule, "observe"):
            self.schedule.observe(value)


@dataclass
class warmup(_ScheduleWrapper):  # noqa: N801 - as above
    """Another schedule times a factor that rises linearly from ``start`` to 1 in the first ``epochs`` epochs.

    Examples
    --------
    >>> schedule = warmup(0.4, epochs=5, start=0.25)
    >>> schedule(0), round(schedule(2.5), 6), schedule(5)
    (0.1, 0.25, 0.4)
    """

    epochs: float
    start: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        self.epochs, self.start = check_positive(self.epochs, "epochs"), _check_range(self.start, "start", 1)

    def __call__(self, epoch: float) -> float:
        """Return the learning rate."""
        factor = min(1.0, self.start + (1 - self.start) * epoch / self.epochs)
        return factor * float(self.schedule(epoch))


@dataclass
class scaled(_ScheduleWrapper):  # noqa: N801 - as above
    """Another schedule times the number of ranks, since the global batch grows with them (linear scaling).

    Parameters
    ----------
    schedule : callable or float
    n_ranks : int
        The number of ranks, which `synkhronos.fork` returns.
    """

    n_ranks: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self.n_ranks = check_at_least(self.n_ranks, "n_ranks", 1)

    def __call__(self, epoch: float) -> float:
        """Return the learning rate."""
        return self.n_ranks * float(self.schedule(epoch))


@dataclass
class plateau:  # noqa: N801
    """A learning rate that falls when validation has not improved for ``patience`` reports.

    A lower value is better.  If the checkpoints' ``keep_best`` names the first metric of ``validate`` with "max", the
    trainer passes its negative to `observe`.

    Parameters
    ----------
    rate : float
        The initial rate.
    factor : float
        Multiplies the rate; below 1.
    patience : int
        Number of successive reports without an improvement after which the rate falls.
    min_rate : float
        Lower bound of the rate, at most ``rate``.

    Attributes
    ----------
    best : float
        Lowest observed value so far.
    n_bad_reports : int
        Number of reports without an improvement since the best value, or since the rate last fell.

    Examples
    --------
    >>> schedule = plateau(0.1, factor=0.5, patience=2)
    >>> for loss in [1.0, 0.9, 0.95, 0.91]:
    ...     schedule.observe(loss)
    >>> schedule(4)
    0.05
    """

    rate: float
    factor: float = 0.1
    patience: int = 5
    min_rate: float = 0.0
    best: float = field(default=math.inf, init=False)
    n_bad_reports: int = field(default=0, init=False)
    initial_rate: float = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.rate, self.factor = check_positive(self.rate, "rate"), check_positive(self.factor, "factor")
        if self.factor >= 1:
            raise ValueError(f"factor: expected a number below 1, got {self.factor!r}")
        self.patience = check_at_least(self.patience, "patience", 1)
        self.min_rate = _check_range(self.min_rate, "min_rate", self.rate)
        self.initial_rate = self.rate

    @property
    def _identity(self) -> list[Any]:
        """Class and initial rate: the identity of the schedule in a checkpoint."""
        return [type(self).__name__, self.initial_rate]

    def __call__(self, epoch: float) -> float:
        """Return the learning rate."""
        return self.rate

    def observe(self, value: float) -> None:
        """Compare a value with the best one, the lowest, and lower the rate after ``patience`` worse ones."""
        if value < self.best:
            self.best, self.n_bad_reports = value, 0
            return
        self.n_bad_reports += 1
        if self.n_bad_reports >= self.patience:
            self.rate, self.n_bad_reports = max(self.min_rate, self.rate * self.factor), 0
