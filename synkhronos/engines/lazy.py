"""Outputs that are read when somebody asks for them.

`LazyEngine`
    An engine whose functions may return before they have computed.
`Result`
    What a call returns in place of an array whose computation has only been started.
`Results`
    The master's record of those that were not read yet.
`FetchOutputs`, `DropOutputs`
    The commands that reduce unread outputs over the ranks, or drop them.

A training loop that reads its loss once an epoch should not wait for it at every step, nor move it between ranks.  So
each rank keeps its own outputs where they were computed, and the master gets a `Result`; when one is looked at, all
that are unread are reduced, in one command.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby, islice
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from synkhronos import ranks
from synkhronos.engines.base import Engine
from synkhronos.ranks import Command, PendingOperation, Rank, Session

#: Calls whose outputs nobody will read, and their bytes on a rank, up to which they are kept on the ranks.
_MOST_CALLS, _MOST_BYTES = 256, 1 << 24


class _UnreadOutputs(dict[int, tuple[Engine, Any]], PendingOperation):
    """One rank's outputs until then, and what fetches them, by the number of the command."""

    def cancel(self, command: int) -> None:
        """Drop the outputs of a command that has failed since: nobody gets them."""
        self.pop(command, None)


def _unread(rank: Rank) -> _UnreadOutputs:
    def make() -> _UnreadOutputs:
        made = _UnreadOutputs()
        rank.pending.append(made)
        return made

    return rank.registry.get(_UnreadOutputs, make)


@dataclass(frozen=True, slots=True)
class FetchOutputs(Command):
    """Reduce unread outputs over the ranks."""

    calls: tuple[int, ...]

    def run(self, rank: Rank) -> Any:
        """Return, in the master, each call's outputs."""
        unread = [_unread(rank)[call] for call in self.calls]
        outputs: list[Any] = []
        for engine, run in groupby(unread, itemgetter(0)):
            kept = [mine for _, mine in run]
            fetched = iter(engine.fetch([value for each in kept for value in each.values]))
            outputs += [each.with_values(list(islice(fetched, len(each.values)))) for each in kept]
        # Nothing is dropped here: workers come by without waiting for the master, who may fail and ask again.
        return outputs[0].reduce_many(rank, outputs)


@dataclass(frozen=True, slots=True)
class DropOutputs(Command):
    """Drop unread outputs."""

    calls: tuple[int, ...]

    def run(self, rank: Rank) -> None:
        """Drop them on this rank."""
        for call in self.calls:
            _unread(rank).pop(call, None)


class _Call:
    """One call's outputs: a number on the ranks, or the values, once they are read."""

    __slots__ = ("__weakref__", "error", "number", "values")

    def __init__(self, number: int):
        self.number = number
        self.values: list[Any] | None = None
        self.error: Exception | None = None


class _Reference(weakref.ref[_Call]):
    """A weak reference to a call that knows what it was when it is gone."""

    number: int
    nbytes: int

    @classmethod
    def to(cls, call: _Call, callback: Callable[[Any], None], number: int, nbytes: int) -> _Reference:
        """Return a reference that is handed to ``callback`` when the call is gone."""
        made = cls(call, callback)
        made.number, made.nbytes = number, nbytes
        return made


class Results(PendingOperation):
    """The master's record of the calls of one session whose outputs are unread."""

    def __init__(self, session: Session):
        self._session = weakref.ref(session)
        self._unread: dict[int, _Reference] = {}
        self._gone: list[_Reference] = []
        self._dropped: list[int] = []
        self._dropped_bytes = 0
        session.rank.pending.append(self)

    @classmethod
    def of(cls, session: Session) -> Results:
        """Return the session's record."""
        return session.registry.get(cls, lambda: cls(session))

    def add(self, number: int, nbytes: int, count: int) -> list[Result]:
        """Return the results of a call that has just been started."""
        call = _Call(number)
        # When nobody can read them any more, nothing runs that is written in Python: it could swallow an interrupt.
        self._unread[number] = _Reference.to(call, self._gone.append, number, nbytes)
        return [Result(self, call, i) for i in range(count)]

    def tidy(self, session: Session) -> None:
        """Have the ranks drop what nobody will read, when it has become much."""
        while self._gone:
            self._drop(self._gone[0])
            del self._gone[0]
        if len(self._dropped) < _MOST_CALLS and self._dropped_bytes < _MOST_BYTES:
            return
        forget = DropOutputs(tuple(self._dropped))
        session.run(forget)
        del self._dropped[: len(forget.calls)]
        self._dropped_bytes = 0

    def read(self) -> None:
        """Read all that is unread and that somebody still holds."""
        session = self._session()
        assert session is not None
        held = [reference() for _, reference in sorted(self._unread.items())]
        calls = [call for call in held if call is not None and call.values is None and call.error is None]
        if not calls:
            return
        try:
            together = session.run(FetchOutputs(tuple(call.number for call in calls)))
        except Exception:
            if session.closed is not None:
                raise
            # Some can't be reduced: who looks at those gets the error, and the others are read all the same.
            for call in calls:
                try:
                    (call.values,) = session.run(FetchOutputs((call.number,)))
                except Exception as error:
                    if session.closed is not None:
                        raise
                    call.error = error
        else:
            for call, values in zip(calls, together, strict=True):
                call.values = values
        for call in calls:
            self._drop(self._unread[call.number])
        self.tidy(session)

    finish = read  # the ranks that have it are about to end

    def _drop(self, reference: _Reference) -> None:
        """Note that nobody will ask the ranks for a call's outputs any more: they have them still."""
        # Interrupts come at any moment: nothing is forgotten before it is done, and done twice does no harm.
        self._dropped.append(reference.number)
        self._dropped_bytes += reference.nbytes
        self._unread.pop(reference.number, None)

    def values(self, call: _Call) -> list[Any]:
        """Return a call's outputs, reading all that is unread if they are."""
        if call.values is None:
            if call.error is None and call.number in self._unread:
                session = ranks.session()
                if session is self._session():  # else they are others, forked since
                    with session.inner_turn:  # an input of the call that is being prepared may be one
                        session.settle()
                        self.read()
            if call.error is not None:
                raise call.error
        if call.values is None:
            raise RuntimeError("the ranks ended before this output was read")
        return call.values


_Mixin = np.lib.mixins.NDArrayOperatorsMixin


class Result(_Mixin):
    """An output that is read when it is looked at.

    Behaves as the NumPy array that it stands for: in arithmetic, indexing, ``float()``, ``np.asarray()``, and by all of
    an array's attributes.  Looking at it waits for the computation, reduces over the ranks, and keeps the array.
    """

    # Older NumPy's mixin has no slots, and so a place for weak references already.
    __slots__ = ("_call", "_index", "_results") + ("__weakref__",) * (not hasattr(_Mixin, "__weakref__"))
    __array_priority__ = 1000

    def __init__(self, results: Results, call: _Call, index: int):
        self._results: Results | None = results
        self._call = call
        self._index = index

    def _read(self) -> Any:
        if self._results is not None:
            value = self._results.values(self._call)[self._index]
            self._results = None
            return value
        assert self._call.values is not None
        return self._call.values[self._index]

    def _writable(self) -> Any:
        """Return the array, to be written in place: in memory of its own, if it still lies in JAX's."""
        value = self._read()
        if isinstance(value, np.generic) or isinstance(value, np.ndarray) and not value.flags.writeable:
            assert self._call.values is not None
            value = self._call.values[self._index] = np.array(value)
        return value

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        array = np.asarray(self._read(), dtype)
        return array.copy() if copy else array

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        plain = [value._read() if isinstance(value, Result) else value for value in inputs]
        if "out" in kwargs:
            kwargs["out"] = tuple(value._writable() if isinstance(value, Result) else value for value in kwargs["out"])
        return getattr(ufunc, method)(*plain, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # a protocol that arrays may have, asked for without a wish to read
            raise AttributeError(name)
        return getattr(self._read(), name)

    def __getitem__(self, key: Any) -> Any:
        return self._read()[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._writable()[key] = value

    def __len__(self) -> int:
        return len(self._read())

    def __iter__(self) -> Iterator[Any]:
        return iter(self._read())

    def __float__(self) -> float:
        return float(self._read())

    def __int__(self) -> int:
        return int(self._read())

    def __complex__(self) -> complex:
        return complex(self._read())

    def __index__(self) -> int:
        return self._read().__index__()

    def __bool__(self) -> bool:
        return bool(self._read())

    def __contains__(self, value: Any) -> bool:
        return value in self._read()

    def __format__(self, spec: str) -> str:
        return format(self._read(), spec)

    def __repr__(self) -> str:
        return repr(self._read())

    def __str__(self) -> str:
        return str(self._read())

    def __copy__(self) -> np.ndarray:
        return np.array(self._read())

    def __deepcopy__(self, memo: dict[int, Any]) -> np.ndarray:
        return np.array(self._read())

    def __reduce__(self) -> Any:
        return np.array, (np.asarray(self._read()),)


class LazyEngine(Engine):
    """An engine whose functions may return before they have computed: each rank keeps its outputs until then."""

    def before_call(self, session: Session) -> None:
        """Have the ranks drop what nobody will read."""
        Results.of(session).tidy(session)

    def collect(self, rank: Rank, outputs: Any) -> tuple[int, int, int]:
        """Keep the outputs until they are read; return the number of the command, their size and their count."""
        outputs = outputs.detach(rank)
        unread = _unread(rank)
        assert rank.command not in unread, "two calls with outputs in one command"
        unread[rank.command] = self, outputs
        nbytes = sum(int(getattr(value, "nbytes", 0)) for value in outputs.values)
        return rank.command, nbytes, outputs.n_outputs

    def results(self, session: Session, collected: Any) -> list[Any]:
        """Return what stands for the outputs."""
        return Results.of(session).add(*collected)
