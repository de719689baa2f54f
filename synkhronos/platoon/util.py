"""Platoon's exceptions, and its metaclass of singletons."""

from __future__ import annotations

import sys
from typing import Any


class PlatoonError(Exception):
    """An error of the connection between a worker and its controller, or an incorrect use of it."""

    def __init__(self, descr: object, from_exc: BaseException | None = None):
        super().__init__(descr, from_exc)
        self.descr, self.from_exc = descr, from_exc

    def __str__(self) -> str:
        reason = "" if self.from_exc is None else f"\nReason: {self.from_exc}"
        return f"ERROR! {self.descr}{reason}"


class EndOfBatches(PlatoonError):
    """The queue of mini-batches is closed and empty.

    Attributes
    ----------
    is_idle : bool
        Whether the worker has received no mini-batch since its last request, so that no result of it is missing.
    """

    def __init__(self, is_idle: bool):
        super().__init__("no mini-batch: the controller has closed the queue, and all were received")
        self.is_idle = is_idle


class SingletonType(type):
    """Metaclass of singletons: later calls return the first instance of this process."""

    def __init__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any]):
        super().__init__(name, bases, namespace)
        cls.instance: Any = None

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return the instance; arguments of later calls are ignored, with a warning."""
        if cls.instance is None:
            cls.instance = super().__call__(*args, **kwargs)
        elif args or kwargs:
            sys.stderr.write(f"WARNING! {cls.__name__} exists already: its arguments are ignored\n")
        return cls.instance
