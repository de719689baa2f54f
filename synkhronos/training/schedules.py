"""Learning rates that change.

A schedule is called with the number of epochs trained so far, a float, and returns the learning rate.  A function of
your own is a schedule, too, if the ranks can import it.

`constant`
    Always the same.
`steps`
    Falls at some epochs.
`cosine`
    Falls along a cosine.
`warmup`
    Rises to another schedule in the first epochs.
`scaled`
    Another schedule times the number of ranks.
`plateau`
    Falls when validation gets no better.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from synkhronos.checks import check_positive

Schedule = Callable[[float], float]


def state_of(schedule: Any) -> dict[str, Any]:
    """Return what a schedule has learnt from validation, for a checkpoint; nothing of one that learns nothing."""
    found = _learnt(schedule)
    state: dict[str, Any] = {
        name: found[name] for name in ("rate", "best", "since") if name in found and not math.isinf(found[name])
    }
    return {"made": _made(schedule), **state} if found else {}


def set_state(schedule: Any, state: Mapping[str, Any]) -> None:
    """Give a schedule what `state_of` has returned, if that is of the same kind and was made with the same rate.

    Any other stays as its user has made it.
    """
    if state.get("made") == _made(schedule):
        _learnt(schedule).update({name: value for name, value in state.items() if name != "made"})


def _made(schedule: Any) -> list[Any]:
    """Return the kind of a schedule that learns, and the rate that it began with, where that is known."""
    schedule = _innermost(schedule)
    return [type(schedule).__name__, getattr(schedule, "initial", None)]


def forget(schedule: Any) -> None:
    """Have `plateau` compare with nothing from before, as it will observe something else; its rate stays."""
    schedule = _innermost(schedule)
    if isinstance(schedule, plateau):
        schedule.best, schedule.since = math.inf, 0


def _learnt(schedule: Any) -> dict[str, Any]:
    """Return the attributes of a schedule that observes validation, to be changed; none of another."""
    schedule = _innermost(schedule)
    return vars(schedule) if hasattr(schedule, "observe") else {}


def _innermost(schedule: Any) -> Any:
    while hasattr(schedule, "schedule"):
        schedule = schedule.schedule
    return schedule


def as_schedule(value: Schedule | float) -> Schedule:
    """Return a schedule: itself, or a number that stays."""
    return value if callable(value) else constant(value)


@dataclass
class constant:  # noqa: N801 - these read as functions do
    """Always the same learning rate."""

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
        The rate at first.
    factors : dict of float to float
        For each epoch a factor, by which the rate is multiplied from that epoch on; all factors so far count.

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
        self.factors = {float(at): check_positive(factor, "factors") for at, factor in dict(self.factors).items()}

    def __call__(self, epoch: float) -> float:
        """Return the learning rate."""
        return self.rate * math.prod(factor for at, factor in self.factors.items() if epoch >= at)


@dataclass
class cosine:  # noqa: N801
    """A learning rate that falls along half a cosine, to ``least`` after so many epochs.

    Examples
    --------
    >>> schedule = cosine(0.1, epochs=10)
    >>> schedule(0), round(schedule(5), 6), schedule(10)
    (0.1, 0.05, 0.0)
    """

    rate: float
    epochs: float
    least: float = 0.0

    def __post_init__(self) -> None:
        self.rate, self.epochs = check_positive(self.rate, "rate"), check_positive(self.epochs, "epochs")

    def __call__(self, epoch: float) -> float:
        """Return the learning rate."""
        done = min(1.0, epoch / self.epochs)
        return self.least + (self.rate - self.least) * (1 + math.cos(math.pi * done)) / 2


@dataclass
class _Around:
    """A schedule that changes the rates of another one."""

    schedule: Any  # a schedule, or a number that stays

    def __post_init__(self) -> None:
        self.schedule = as_schedule(self.schedule)

    def observe(self, value: float) -> None:
        """Pass on what validation has found."""
        if hasattr(self.schedule, "observe"):
            self.schedule.observe(value)


@dataclass
class warmup(_Around):  # noqa: N801 - as above
    """A schedule that rises linearly in the first epochs, from a part of another schedule to all of it.

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
        self.epochs = check_positive(self.epochs, "epochs")

    def __call__(self, epoch: float) -> float:
        """Return the learning rate."""
        part = min(1.0, self.start + (1 - self.start) * epoch / self.epochs)
        return part * float(self.schedule(epoch))


@dataclass
class scaled(_Around):  # noqa: N801 - as above
    """Another schedule times the number of ranks, as the batch of all ranks grows with them (linear scaling).

    Parameters
    ----------
    schedule : callable or float
    n : int
        The number of ranks, which `synkhronos.fork` returns.
    """

    n: int

    def __call__(self, epoch: float) -> float:
        """Return the learning rate."""
        return self.n * float(self.schedule(epoch))


@dataclass
class plateau:  # noqa: N801
    """A learning rate that falls when validation has not got better for some reports.

    Parameters
    ----------
    rate : float
        At first.
    factor : float
        By which it is multiplied.
    patience : int
        The reports without a better value after which it is.
    least : float
        Below which it doesn't fall.

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
    least: float = 0.0
    best: float = field(default=math.inf, init=False)
    since: int = field(default=0, init=False)
    initial: float = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.rate, self.factor = check_positive(self.rate, "rate"), check_positive(self.factor, "factor")
        self.initial = self.rate

    def __call__(self, epoch: float) -> float:
        """Return the learning rate."""
        return self.rate

    def observe(self, value: float) -> None:
        """Take what validation has found."""
        if value < self.best:
            self.best, self.since = value, 0
            return
        self.since += 1
        if self.since >= self.patience:
            self.rate, self.since = max(self.least, self.rate * self.factor), 0
