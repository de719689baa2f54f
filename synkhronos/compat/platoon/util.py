"""Platoon's exceptions, and its metaclass of singletons."""

from __future__ import annotations

import sys
from typing import Any


class PlatoonException(Exception):
    """A message with a severity, and the exception behind it.

    Parameters
    ----------
    severity : str
        First word of the message, ``"ERROR"`` or ``"WARNING"``.
    descr : str
    from_exc : exception, optional
    """

    def __init__(self, severity: str, descr: object, from_exc: BaseException | None = None):
        super().__init__(severity, descr, from_exc)
        self.severity, self.descr, self.from_exc = severity, descr, from_exc

    def __str__(self) -> str:
        reason = "" if self.from_exc is None else f"\nReason: {self.from_exc}"
        return f"{self.severity}! {self.descr}{reason}"


class PlatoonError(PlatoonException):
    """An error of the connection between workers and controller, or of its use."""

    def __init__(self, descr: object, from_exc: BaseException | None = None):
        super().__init__("ERROR", descr, from_exc)


class PlatoonWarning(PlatoonException):
    """A message that Platoon's programs print."""

    def __init__(self, descr: object, from_exc: BaseException | None = None):
        super().__init__("WARNING", descr, from_exc)


class EndOfBatches(PlatoonError):
    """The queue of mini-batches is closed and empty.

    Attributes
    ----------
    is_idle : bool
        Whether the worker has received no mini-batch since its last request: it has nothing to hand in.
    """

    def __init__(self, is_idle: bool):
        super().__init__("no mini-batch: the controller has closed the queue, and all were received")
        self.is_idle = is_idle


class SingletonType(type):
    """Metaclass of classes with one instance per process: later calls return the first instance."""

    def __init__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any]):
        super().__init__(name, bases, namespace)
        cls.instance: Any = None

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return the instance; arguments count at the first call only."""
        if cls.instance is None:
            cls.instance = super().__call__(*args, **kwargs)
        elif args or kwargs:
            sys.stderr.write(f"{PlatoonWarning(f'{cls.__name__} exists already: its arguments are ignored')}\n")
        return cls.instance
