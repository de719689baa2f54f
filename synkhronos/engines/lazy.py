"""Outputs that are read from the ranks at the user's first access.

A training loop that reads its loss once per epoch should not wait for it at every step.  Each rank therefore stores its
outputs, and the call returns a `Result` for each output.  The first access to a result reduces all unread outputs over
the ranks, by one command::

    call          LazyEngine.reduce_or_store_outputs: each rank stores its outputs under the command's number
                  LazyEngine.make_results: the master returns `Result`s and records the call in its `ResultTable`
    access        ReduceStoredOutputs(all unread calls whose results exist)
    deletion      a weak reference of `ResultTable` calls back
    limits        DropStoredOutputs(calls that were read or deleted), once there are many of them
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, islice
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from synkhronos import ranks
from synkhronos.engines.engine import Engine
from synkhronos.engines.outputs import RankOutputs
from synkhronos.ranks import Command, PendingOperation, Rank, Session

#: The ranks drop the outputs of calls that were read or deleted once there are this many of these calls.
_MAX_DROPPABLE_CALLS = 256
#: The ranks also drop these outputs once they have this many bytes on a rank.
_MAX_DROPPABLE_NBYTES = 1 << 24


class _StoredOutputs(dict[int, tuple[Engine, RankOutputs]], PendingOperation):
    """A rank's stored outputs, each with the engine that fetches it, by the number of the command."""

    def __init__(self, rank: Rank):
        super().__init__()
        rank.pending_operations.append(self)

    def resolve_failed_command(self, command_number: int) -> None:
        """Drop the outputs of a failed command, which have no `Result`."""
        self.pop(command_number, None)


def _get_stored_outputs(rank: Rank) -> _StoredOutputs:
    return rank.registry.get_or_create(_StoredOutputs, lambda: _StoredOutputs(rank))


@dataclass(frozen=True, slots=True)
class ReduceStoredOutputs(Command):
    """Reduce stored outputs over the ranks."""

    command_numbers: tuple[int, ...]

    def run(self, rank: Rank) -> Any:
        """Return a list of outputs for each call in the master."""
        stored = [_get_stored_outputs(rank)[number] for number in self.command_numbers]
        outputs: list[RankOutputs] = []
        for engine, group in groupby(stored, itemgetter(0)):
            own_outputs = [call_outputs for _, call_outputs in group]
            fetched = iter(
                engine.fetch_outputs([value for call_outputs in own_outputs for value in call_outputs.values])
            )
            for call_outputs in own_outputs:
                outputs.append(call_outputs.with_values(list(islice(fetched, len(call_outputs.values)))))
        # Outputs are not dropped here: if the master's part fails, it fetches them again.
        return RankOutputs.reduce_many(rank, outputs)


@dataclass(frozen=True, slots=True)
class DropStoredOutputs(Command):
    """Drop stored outputs."""

    command_numbers: tuple[int, ...]

    def run(self, rank: Rank) -> None:
        for number in self.command_numbers:
            _get_stored_outputs(rank).pop(number, None)


@dataclass(slots=True, weakref_slot=True, eq=False)
class _CallOutputs:
    """Outputs of one call in the master: the command's number, and once they are read, their values or an error."""

    command_number: int
    values: list[Any] | None = None
    error: Exception | None = None


#: A weak reference whose key, the command's number and the bytes of the outputs, can be used after the deletion.
_CallReference = weakref.KeyedRef[tuple[int, int], _CallOutputs]


class ResultTable(PendingOperation):
    """The master's table of a session's calls with unread outputs."""

    def __init__(self, session: Session):
        self._session = weakref.ref(session)
        self._unread_calls: dict[int, _CallReference] = {}
        self._deleted_calls: list[_CallReference] = []
        self._droppable_numbers: list[int] = []
        self._droppable_nbytes = 0
        session.rank.pending_operations.append(self)

    @classmethod
    def get_or_create(cls, session: Session) -> ResultTable:
        """Return the session's table."""
        return session.registry.get_or_create(cls, lambda: cls(session))

    def add_call(self, command_number: int, nbytes: int, n_outputs: int) -> list[Result]:
        """Add a call with outputs of ``nbytes`` on the master's rank.  Return a `Result` for each of its outputs."""
        call = _CallOutputs(command_number)
        # The callback is a C function: a callback in Python could swallow an interrupt.
        self._unread_calls[command_number] = _CallReference(call, self._deleted_calls.append, (command_number, nbytes))
        return [Result(self, call, i) for i in range(n_outputs)]

    def drop_unneeded(self, session: Session) -> None:
        """Drop stored outputs of calls that were read or deleted, above the limits."""
        while self._deleted_calls:
            self._mark_droppable(self._deleted_calls[0])
            del self._deleted_calls[0]
        if len(self._droppable_numbers) < _MAX_DROPPABLE_CALLS and self._droppable_nbytes < _MAX_DROPPABLE_NBYTES:
            return
        drop = DropStoredOutputs(tuple(self._droppable_numbers))
        session.run(drop)
        del self._droppable_numbers[: len(drop.command_numbers)]
        self._droppable_nbytes = 0

    def read_all(self) -> None:
        """Read all unread outputs whose results exist."""
        session = self._session()
        assert session is not None
        alive = [reference() for _, reference in sorted(self._unread_calls.items())]
        calls = [call for call in alive if call is not None and call.values is None and call.error is None]
        if not calls:
            return
        try:
            values_by_call = session.run(ReduceStoredOutputs(tuple(call.command_number for call in calls)))
        except Exception:
            if session.close_reason is not None:
                raise
            # The outputs of some calls can't be reduced, and raise the error at their access.  Others are read.
            for call in calls:
                try:
                    (call.values,) = session.run(ReduceStoredOutputs((call.command_number,)))
                except Exception as error:
                    if session.close_reason is not None:
                        raise
                    call.error = error
        else:
            for call, values in zip(calls, values_by_call, strict=True):
                call.values = values
        for call in calls:
            self._mark_droppable(self._unread_calls[call.command_number])
        self.drop_unneeded(session)

    finish = read_all  # before the ranks end, with which the outputs would be lost

    def _mark_droppable(self, reference: _CallReference) -> None:
        """Move a call from the unread calls to the calls that the ranks may drop."""
        # An interrupt may come between any two lines.  The call is added first, as dropping it twice has no effect.
        # If its bytes are counted twice, the ranks only drop earlier.
        command_number, nbytes = reference.key
        self._droppable_numbers.append(command_number)
        self._droppable_nbytes += nbytes
        self._unread_calls.pop(command_number, None)

    def get_values(self, call: _CallOutputs) -> list[Any]:
        """Return a call's outputs.  If they are unread, read all unread outputs first.

        Raise RuntimeError if the ranks ended before the outputs were read, or else the error of the outputs' reduction.
        """
        if call.values is None:
            if call.error is None and call.command_number in self._unread_calls:
                session = ranks.get_session()
                if session is self._session():  # else the session has ended, and another one was started
                    with session.nested_call_lock:  # this result may be an input of a call in preparation
                        session.wait_until_idle()
                        self.read_all()
            if call.error is not None:
                raise call.error
        if call.values is None:
            raise RuntimeError("the ranks ended before this output was read")
        return call.values


_Mixin = np.lib.mixins.NDArrayOperatorsMixin


class Result(_Mixin):
    """An output that is computed asynchronously, and read at its first access.

    It behaves like the NumPy array that it represents: in arithmetic, indexing, ``float()`` and ``np.asarray()``, and
    with all attributes of an array.  The first access waits for the computation and reduces the output over the ranks.

    Examples
    --------
    >>> losses = [train(x, y, batch) for batch in batches]  # doctest: +SKIP
    >>> float(losses[-1])  # waits here  # doctest: +SKIP
    """

    # The mixin of older NumPy has no slots, so its instances support weak references already.
    __slots__ = ("_call", "_index", "_table") + ("__weakref__",) * (not hasattr(_Mixin, "__weakref__"))
    __array_priority__ = 1000

    def __init__(self, table: ResultTable, call: _CallOutputs, index: int):
        self._table: ResultTable | None = table
        self._call = call
        self._index = index

    def _read(self) -> Any:
        if self._table is not None:
            value = self._table.get_values(self._call)[self._index]
            self._table = None
            return value
        assert self._call.values is not None
        return self._call.values[self._index]

    def _get_writable(self) -> Any:
        """Return the array for writing in place, as a copy if the memory belongs to JAX."""
        value = self._read()
        if isinstance(value, np.generic) or isinstance(value, np.ndarray) and not value.flags.writeable:
            assert self._call.values is not None
            value = self._call.values[self._index] = np.array(value)
        return value

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        array = np.asarray(self._read(), dtype)
        return array.copy() if copy else array

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        values = [value._read() if isinstance(value, Result) else value for value in inputs]
        if "out" in kwargs:
            kwargs["out"] = tuple(
                value._get_writable() if isinstance(value, Result) else value for value in kwargs["out"]
            )
        if isinstance(where := kwargs.get("where"), Result):
            kwargs["where"] = where._read()
        return getattr(ufunc, method)(*values, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # libraries probe for array protocols, which must not read
            raise AttributeError(name)
        return getattr(self._read(), name)

    def __getitem__(self, key: Any) -> Any:
        return self._read()[key]

    def __setitem__(self, key: Any, value: object) -> None:
        self._get_writable()[key] = value

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

    def __contains__(self, value: object) -> bool:
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
    """An engine whose functions may return before they have computed.

    A call returns a `Result` for each output.  `fetch_outputs` must wait for the outputs, unless it leaves them on the
    device.
    """

    def prepare_call(self, session: Session) -> None:
        """Drop stored outputs of calls that were read or deleted, if there are many."""
        ResultTable.get_or_create(session).drop_unneeded(session)

    def reduce_or_store_outputs(self, rank: Rank, outputs: RankOutputs) -> tuple[int, int, int]:
        """Store the outputs until they are read.  Return the arguments of `ResultTable.add_call`."""
        outputs = outputs.prepare_deferred_reduction(rank)
        stored = _get_stored_outputs(rank)
        assert rank.command_number not in stored, "two calls with outputs in one command"
        stored[rank.command_number] = self, outputs
        nbytes = sum(int(getattr(value, "nbytes", 0)) for value in outputs.values)
        return rank.command_number, nbytes, len(outputs.spec.ops)

    def make_results(self, session: Session, command_result: tuple[int, int, int]) -> list[Any]:
        """Return a `Result` for each output."""
        return ResultTable.get_or_create(session).add_call(*command_result)
