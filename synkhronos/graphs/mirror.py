"""Copies graphs to all ranks, each shared variable once.

`declare`, `is_declared`
    Which shared variables functions use.
`Mirror`
    The master's record of which shared variables the workers have.
`Parcel`, `Receive`
    Pickled objects in shared memory, arrays beside the stream, and the command that unpacks them.
`object_of`
    A mirrored object on any rank, by its key.
`moved_apart`, `restarted`
    Where each rank is in a random generator's stream.

Every rank has its own copy of each shared variable.  The master gives each a key when it is first sent; pickles that
follow say the key in its place, so that functions made later refer to the same copy.  The user's own classes and
functions go by name where the workers have the same code under it, and whole where they don't (`code`).
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import pickle
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import cloudpickle
import numpy as np

from synkhronos.graphs import GraphLibrary, library_of
from synkhronos.graphs.code import Name, UserCode, is_importable, is_the_users, outdated
from synkhronos.ranks import Command, Rank, Session, SharedArray, WeakKeys

#: Arrays in a parcel start at multiples of this many bytes, as processors like them.
_ALIGNMENT = 64


#: The shared variables that functions use, whatever ranks there are.
_declared: WeakKeys[Any, bool] = WeakKeys()
#: How many jumps ahead of the master's any rank's stream has been, for each random generator.  Workers that come later
#: start behind that: those before may have drawn more than the master, whose stream says nothing of it.
_furthest: WeakKeys[Any, int] = WeakKeys()


def declare(shareds: Iterable[Any]) -> None:
    """Note that a function uses these shared variables: they may be sent when somebody asks for them."""
    for shared in shareds:
        _declared[shared] = True


def is_declared(shared: Any) -> bool:
    """Whether a function uses the shared variable."""
    return shared in _declared


class Mirror:
    """The master's record of the shared variables that the workers have.

    Variables are held weakly: one that the user has dropped is dropped on all ranks.
    """

    def __init__(self, session: Session):
        self._session = weakref.ref(session)
        self._keys: WeakKeys[Any, tuple[str, int]] = WeakKeys()
        self._last = 0
        #: The user's modules that differ on a worker from the master's, or are missing there: their code is sent.
        self._by_value: set[str] = set()

    @classmethod
    def of(cls, session: Session) -> Mirror:
        """Return the session's mirror."""
        return session.registry.get(cls, lambda: cls(session))

    def key(self, shared: Any) -> tuple[str, int] | None:
        """Return a shared variable's key, None if the workers don't have it."""
        return self._keys.get(shared)

    def send(self, values: Sequence[tuple[Any, Any]], variables: Sequence[Any]) -> None:
        """Copy values to the workers, under their keys, with the shared variables that are new to them.

        Parameters
        ----------
        values : list of (key, object)
            What to keep in the workers' stores; may be none.  Each has a method ``to_device``, called where it arrives,
            and an attribute ``code``, which becomes the user's code in it.
        variables : list of variables
            All that the values are made of.

        Raises
        ------
        TypeError
            If a graph can't be pickled, or a random generator can't be moved; nothing is sent then.
        """
        session = self._session()
        assert session is not None
        library = library_of(*variables[:1]) if variables else None
        shareds = library.shareds(variables) if library is not None else []
        keyed = []
        for shared in shareds:
            if self.key(shared) is None:
                self._last += 1
                keyed.append((("shared", self._last), shared))
        if session.size > 1:
            starts = []
            for _, shared in keyed:
                start = 0
                if library is not None and library.is_generator(shared):
                    library.check_stream(shared, library.stream(shared), moves=True)
                    start = _furthest.get(shared) or 0
                    _furthest[shared] = start + session.size - 1
                starts.append(start)
            # Every node comes after those it depends on, so that pickle, which follows references, never goes deep.
            nodes = library.nodes(variables) if library is not None else []
            outdated: set[str] | None = None
            while outdated is None or outdated:
                code, parcel = self.pack((nodes, [*keyed, *values], starts))
                try:
                    path = tuple(map(os.path.abspath, sys.path))
                    outdated = session.run(Receive(parcel, sys.getrecursionlimit(), path, code.expected()))
                except BaseException:
                    for key, _ in [*keyed, *values]:
                        session.memory.release("object", key)
                    raise
                finally:
                    session.memory.release("segment", parcel.location.key)
                self._by_value |= outdated
            for _, value in values:
                value.code = code
        for key, shared in keyed:
            self._keys[shared] = key
            session.rank.objects[key] = weakref.ref(shared)
            session.memory.release_with(shared, "object", key)

    def pack(self, value: Any) -> tuple[UserCode, Parcel]:
        """Pickle a value for the workers: shared variables that they have become keys.

        The user's code that it names is returned too: the workers have to have the same.
        """
        session = self._session()
        assert session is not None
        buffers: list[pickle.PickleBuffer] = []
        stream, code = io.BytesIO(), UserCode()
        try:
            with _by_value(self._by_value):
                _Pickler(stream, self._keys, buffers, self._by_value, code).dump(value)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise TypeError(
                f"the graph can't be pickled, as it has to be for the workers: {error}{self._advice()}"
            ) from error
        code.describe()
        parts = [stream.getbuffer(), *(buffer.raw() for buffer in buffers)]
        spans, end = [], 0
        for part in parts:
            spans.append((end, part.nbytes))
            end += -(-part.nbytes // _ALIGNMENT) * _ALIGNMENT
        segment = session.memory.create(end)
        memory = segment.array((end,), np.dtype(np.uint8))
        for (at, length), part in zip(spans, parts, strict=True):
            memory[at : at + length] = np.frombuffer(part, np.uint8)
        return code, Parcel(SharedArray(segment.key, "u1", (end,)), tuple(spans))

    def _advice(self) -> str:
        """Say what else helps where a module's code has to be sent."""
        if not self._by_value:
            return ""
        return (
            f" (the workers have another version of {', '.join(sorted(self._by_value))}, or none, so that its code has "
            "to be sent: call synkhronos.close() and synkhronos.fork() again for workers that have the present one)"
        )


@dataclass(frozen=True, slots=True)
class Parcel:
    """A pickled value in shared memory."""

    location: SharedArray
    spans: tuple[tuple[int, int], ...]

    def unpack(self, rank: Rank) -> Any:
        """Return the value; its arrays are copies in this process' own memory."""
        memory = self.location.view(rank.segments)
        stream, *arrays = (memory[at : at + length] for at, length in self.spans)
        unpickler = _Unpickler(io.BytesIO(stream.data), buffers=[array.copy() for array in arrays])
        unpickler.rank = rank
        return unpickler.load()


@dataclass(frozen=True, slots=True)
class Receive(Command):
    """The command that unpacks what the master sent: on every rank but the master, which has it."""

    parcel: Parcel
    #: The master's: the libraries follow graphs recursively when they compile, and users raise it for deep ones.
    recursion_limit: int
    #: The master's.
    path: tuple[str, ...]
    #: What the user's code that the parcel names is in the master.
    code: tuple[tuple[Name, bytes], ...]

    def run(self, rank: Rank) -> set[str]:
        """Keep the objects, and move the random generators among the new shared variables.

        Returns
        -------
        set of str
            The modules whose code differs on some rank; if there are any, no rank has kept anything.
        """
        if not rank.is_master:
            sys.setrecursionlimit(max(self.recursion_limit, sys.getrecursionlimit()))
            # What the master can import by now can be imported here.
            sys.path[:] = self.path
            importlib.invalidate_caches()
        if self.code:
            of_this_rank = () if rank.is_master else outdated(self.code)
            of_all = set().union(*rank.exchange_cached(of_this_rank))
            if of_all:
                return of_all
        if rank.is_master:
            return set()
        _, values, starts = self.parcel.unpack(rank)
        for key, value in values:
            rank.objects[key] = _Kept(value)
        for (_, shared), start in zip(values, starts, strict=False):
            library = library_of(shared)
            if library.is_generator(shared):
                library.set_stream(shared, moved_apart(library, library.stream(shared), rank, start))
        for _, value in values[len(starts) :]:
            value.to_device()
        return set()


@contextlib.contextmanager
def _by_value(modules: Iterable[str]) -> Iterator[None]:
    """Have cloudpickle send the code of these modules, rather than their names, meanwhile."""
    before = cloudpickle.list_registry_pickle_by_value()
    added = [sys.modules[name] for name in modules if name in sys.modules and name not in before]
    try:
        for module in added:
            cloudpickle.register_pickle_by_value(module)
        yield
    finally:
        for module in added:
            cloudpickle.unregister_pickle_by_value(module)


class _Pickler(cloudpickle.Pickler):
    """Writes the key of a shared variable in its place, and code that can't be imported as it is.

    ``keys`` are those of shared variables; ``buffers`` takes the arrays, and ``code`` the user's classes and functions.
    The code of the modules in ``by_value`` is sent.
    """

    def __init__(
        self,
        stream: io.BytesIO,
        keys: Any,
        buffers: list[pickle.PickleBuffer],
        by_value: set[str],
        code: UserCode,
    ):
        super().__init__(stream, pickle.HIGHEST_PROTOCOL, buffer_callback=buffers.append)
        self._keys, self._by_value, self._code = keys, by_value, code

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, type | FunctionType) and is_the_users(value.__module__):
            by_name = value.__module__ not in self._by_value and is_importable(value)
            self._code.add(value, by_name)
            return value.__qualname__ if by_name else super().reducer_override(value)
        # A JAX array would start JAX where it is unpickled; the host's copy of it does not.
        if type(value).__module__.startswith("jaxlib") and hasattr(value, "__array__"):
            return np.asarray(value).__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return super().reducer_override(value)

    def persistent_id(self, value: Any) -> Any:
        if getattr(value, "container", None) is None:  # quick: this is asked of every object in the graph
            return None
        try:
            return self._keys.get(value)
        except TypeError:
            return None


class _Unpickler(pickle.Unpickler):
    rank: Rank

    def persistent_load(self, key: Any) -> Any:
        return self.rank.objects[key]()


@dataclass(frozen=True, slots=True)
class _Kept:
    """Stands on a worker where the master has a weak reference: a call returns the object."""

    value: Any

    def __call__(self) -> Any:
        return self.value


def object_of(rank: Rank, key: Any) -> Any:
    """Return this rank's own copy of a mirrored object."""
    reference: Callable[[], Any] = rank.objects[key]
    return reference()


def moved_apart(library: GraphLibrary, value: Any, rank: Rank, start: int = 0) -> Any:
    """Return a rank's own place in a random generator's stream, behind the ``start`` jumps that others have had.

    The master's is the given one: it draws what the serial program would.
    """
    distance = (rank.number - rank.root) % rank.size
    return library.moved(value, start + distance) if distance else value


def restarted(session: Session, generators: Iterable[Any]) -> None:
    """Note that the ranks' streams of random generators start anew, next to a value that the user has given."""
    for shared in generators:
        _furthest[shared] = session.size - 1
