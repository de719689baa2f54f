"""Copies of graphs on all ranks, with one copy of each shared variable on a rank.

The master gives each shared variable a key when it is first sent, and later pickles contain the key in its place, so
that functions made later refer to the same copy.  The user's own classes and functions are pickled by name where the
workers have the same code under it, and by value elsewhere (see `user_code`)::

    master                                            worker
    Mirror.send(values, variables)
      pickle  ------ in shared memory ------------->  ReceiveObjects.run
      keys    ------------------------------------->  rank.objects[key] = _StrongReference(object)
    rank.objects[key] = weakref(object)               get_object(rank, key)

The master holds variables weakly: one that the user has dropped is released on all ranks.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import itertools
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

from synkhronos.devices import find_device
from synkhronos.graphs import GraphLibrary, library_of
from synkhronos.graphs.user_code import Name, UserCode, find_outdated_modules, is_importable, is_user_module
from synkhronos.ranks import Command, Rank, Session, SharedArray, WeakKeyDict
from synkhronos.ranks.pickle_parts import measure_parts, read_parts, write_parts

#: Shared variables that functions use, in any session.
_registered: WeakKeyDict[Any, bool] = WeakKeyDict()
#: Numbers for the keys of shared variables.  No number is used twice, as an old key may be released late.
_numbers = itertools.count(1)
#: Largest number of jumps of any rank's stream from the master's, by random generator.  A later session's streams start
#: after it: workers may have drawn more numbers than the master, and its stream does not show them.
_max_jumps: WeakKeyDict[Any, int] = WeakKeyDict()


def register_shareds(shareds: Iterable[Any]) -> None:
    """Record that a function uses these shared variables: collectives may send them to the workers."""
    for shared in shareds:
        _registered[shared] = True


def is_registered(shared: Any) -> bool:
    """Whether a function uses the shared variable."""
    return shared in _registered


class Mirror:
    """The master's record of the shared variables that the workers have.

    Parameters
    ----------
    session : Session
    """

    def __init__(self, session: Session):
        self._session = weakref.ref(session)
        self._keys: WeakKeyDict[Any, tuple[str, int]] = WeakKeyDict()
        #: The user's modules whose code is sent, because a worker has another version or none.
        self._modules_by_value: set[str] = set()

    @classmethod
    def get(cls, session: Session) -> Mirror:
        """Return the session's mirror."""
        return session.registry.get(cls, lambda: cls._create(session))

    @classmethod
    def _create(cls, session: Session) -> Mirror:
        mirror = cls(session)
        session.add_replacement_callback(mirror, cls._separate_streams)
        return mirror

    def _separate_streams(self) -> None:
        """Move the random generators of new workers apart: the workers are copies of the master."""
        session = self._session()
        assert session is not None
        generators = [shared for shared in self._keys if library_of(shared).is_generator(shared)]
        keys = [self._keys.get(shared) for shared in generators]
        starts = [_choose_start(session, shared) for shared in generators]
        if generators:
            session.run(JumpStreams(tuple(zip(keys, starts, strict=True))))

    def get_key(self, shared: Any) -> tuple[str, int] | None:
        """Return a shared variable's key; None if the workers don't have the variable."""
        return self._keys.get(shared)

    def send(self, values: Sequence[tuple[Any, Any]], variables: Sequence[Any]) -> None:
        """Copy values to the workers, and the shared variables in them that the workers don't have.

        Parameters
        ----------
        values : list of (key, object)
            Objects for `Rank.objects` of the workers; may be empty.  Each has a method ``move_to_device``, which the
            workers call, and an attribute ``code``, which is set to the `UserCode` in the pickle.
        variables : list of variables
            All variables in the values.

        Raises
        ------
        TypeError
            If a graph can't be pickled, or if a random generator can't jump.  Nothing is sent then.
        """
        session = self._session()
        assert session is not None
        library = library_of(*variables[:1]) if variables else None
        shareds = library.find_shareds(variables) if library is not None else []
        keyed = []
        for shared in shareds:
            if self.get_key(shared) is None:
                keyed.append((("shared", next(_numbers)), shared))
        if session.size > 1:
            starts = [_choose_start(session, shared) for _, shared in keyed]
            # In topological order: pickle follows references, and would recurse through the depth of the graph.
            nodes = library.sort_nodes(variables) if library is not None else []
            code = self._send_objects(session, nodes, [*keyed, *values], starts)
            for _, value in values:
                value.code = code
        for key, shared in keyed:
            self._keys[shared] = key
            session.rank.objects[key] = weakref.ref(shared)
            session.memory.release_with(shared, "object", key)

    def _send_objects(
        self, session: Session, nodes: list[Any], objects: list[tuple[Any, Any]], starts: list[int]
    ) -> UserCode:
        """Send objects with their keys, once more if the code of modules has to be sent; return the code in them."""
        outdated: set[str] | None = None
        while outdated is None or outdated:
            code, pickled = self._pickle_to_shared_memory((nodes, objects, starts))
            try:
                path = tuple(map(os.path.abspath, sys.path))
                outdated = session.run(ReceiveObjects(pickled, sys.getrecursionlimit(), path, code.list_digests()))
            except BaseException:
                for key, _ in objects:
                    session.memory.release("object", key)
                raise
            finally:
                session.memory.release("segment", pickled.key)
            self._modules_by_value |= outdated
        return code

    def _pickle_to_shared_memory(self, value: Any) -> tuple[UserCode, SharedArray]:
        """Pickle a value into shared memory, with keys in place of shared variables that the workers have.

        Returns
        -------
        code : UserCode
            The user's classes and functions in the pickle.
        pickled : SharedArray
            The pickle and its arrays (see `pickle_parts`).

        Raises
        ------
        TypeError
            If the value can't be pickled.
        """
        session = self._session()
        assert session is not None
        buffers: list[pickle.PickleBuffer] = []
        stream, code = io.BytesIO(), UserCode()
        try:
            with _pickle_by_value(self._modules_by_value):
                _MirrorPickler(stream, self._keys, buffers, self._modules_by_value, code).dump(value)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise TypeError(
                f"the graph can't be pickled, as it has to be for the workers: {error}{self._format_advice()}"
            ) from error
        code.update_digests()
        parts = [stream.getbuffer(), *(buffer.raw() for buffer in buffers)]
        nbytes = measure_parts(parts)
        segment = session.memory.create(nbytes)
        write_parts(parts, memoryview(segment.buffer))
        return code, SharedArray(segment.key, "u1", (nbytes,))

    def _format_advice(self) -> str:
        """Return advice for an error's message if the code of modules has to be sent; "" otherwise."""
        if not self._modules_by_value:
            return ""
        return (
            f" (the workers have another version of {', '.join(sorted(self._modules_by_value))}, or none, so that its "
            "code has to be sent: call synkhronos.close() and synkhronos.fork() again for workers that have the "
            "present one)"
        )


@dataclass(frozen=True, slots=True)
class ReceiveObjects(Command):
    """Command that unpickles objects on the workers; the master has them.

    Attributes
    ----------
    pickled : SharedArray
        Nodes, objects with their keys, and for each shared variable among them the jumps at which streams start.
    recursion_limit : int
        The master's limit: the libraries compile recursively, and users raise it for deep graphs.
    path : tuple of str
        The master's ``sys.path``.
    code : tuple of (Name, bytes)
        Digests in the master of the user's code that the pickle names.
    """

    pickled: SharedArray
    recursion_limit: int
    path: tuple[str, ...]
    code: tuple[tuple[Name, bytes], ...]

    def run(self, rank: Rank) -> set[str]:
        """Store the objects, and jump with random generators to this rank's streams.

        Returns
        -------
        set of str
            Modules whose code differs on some rank.  If there are any, no rank stores objects.
        """
        if not rank.is_master:
            sys.setrecursionlimit(max(self.recursion_limit, sys.getrecursionlimit()))
            # The pickle may name any module that the master can import now.
            sys.path[:] = self.path
            importlib.invalidate_caches()
        if self.code:
            outdated = () if rank.is_master else find_outdated_modules(self.code)
            outdated_anywhere = set().union(*rank.all_gather_cached(outdated))
            if outdated_anywhere:
                return outdated_anywhere
        if rank.is_master:
            return set()
        stream, *arrays = read_parts(self.pickled.view(rank.segments).data)
        # Copies, in this process's own memory: the segment is released.
        unpickler = _MirrorUnpickler(io.BytesIO(stream), buffers=[np.array(array) for array in arrays])
        unpickler.rank = rank
        _, values, starts = unpickler.load()
        for key, value in values:
            rank.objects[key] = _StrongReference(value)
        for (_, shared), start in zip(values, starts, strict=False):
            if library_of(shared).is_generator(shared):
                _jump(shared, rank, start)
        for _, value in values[len(starts) :]:
            value.move_to_device()
        return set()


@dataclass(frozen=True, slots=True)
class JumpStreams(Command):
    """Command that jumps with random generators of the workers to each rank's streams.

    Attributes
    ----------
    starts : tuple of (key, int)
        Keys of the generators, and the number of jumps at which their streams start.
    """

    starts: tuple[tuple[Any, int], ...]

    def run(self, rank: Rank) -> None:
        """Jump on this rank; the master keeps its streams."""
        for key, start in self.starts:
            _jump(get_object(rank, key), rank, start)


@contextlib.contextmanager
def _pickle_by_value(modules: Iterable[str]) -> Iterator[None]:
    """Context in which cloudpickle pickles classes and functions of these modules by value."""
    before = cloudpickle.list_registry_pickle_by_value()
    added = [sys.modules[name] for name in modules if name in sys.modules and name not in before]
    try:
        for module in added:
            cloudpickle.register_pickle_by_value(module)
        yield
    finally:
        for module in added:
            cloudpickle.unregister_pickle_by_value(module)


class _MirrorPickler(cloudpickle.Pickler):
    """Pickler that replaces shared variables by keys, and pickles code that can't be imported by value.

    Parameters
    ----------
    stream : BytesIO
        Output.
    keys : WeakKeyDict
        Keys of shared variables that the workers have.
    buffers : list
        Output: the arrays, which are not in the stream.
    by_value : set of str
        Modules whose code is pickled by value.
    code : UserCode
        Output: the user's classes and functions.
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
        self._keys, self._modules_by_value, self._code = keys, by_value, code

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, type | FunctionType) and is_user_module(value.__module__):
            by_name = value.__module__ not in self._modules_by_value and is_importable(value)
            self._code.add(value, by_name)
            return value.__qualname__ if by_name else super().reducer_override(value)
        # Unpickling an array of a device could start the device's runtime in the wrong process; a NumPy array does not.
        if (device := find_device(value)).must_move_shared_values:
            return device.to_host(value).__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return super().reducer_override(value)

    def persistent_id(self, value: Any) -> Any:
        if getattr(value, "container", None) is None:  # fast path: pickle calls this for every object
            return None
        try:
            return self._keys.get(value)
        except TypeError:
            return None


class _MirrorUnpickler(pickle.Unpickler):
    rank: Rank

    def persistent_load(self, key: Any) -> Any:
        return self.rank.objects[key]()


@dataclass(frozen=True, slots=True)
class _StrongReference:
    """Counterpart on a worker of the master's weak reference: a call returns the object."""

    value: Any

    def __call__(self) -> Any:
        return self.value


def get_object(rank: Rank, key: Any) -> Any:
    """Return this rank's copy of a mirrored object."""
    reference: Callable[[], Any] = rank.objects[key]
    return reference()


def _choose_start(session: Session, shared: Any) -> int:
    """Return the number of jumps after which the ranks' streams of a random generator start; 0 for other variables."""
    library = library_of(shared)
    if not library.is_generator(shared):
        return 0
    library.check_generator(shared, library.copy_generator(shared), jumps=True)
    start = _max_jumps.get(shared) or 0
    _max_jumps[shared] = start + session.size - 1
    return start


def jump_to_rank(library: GraphLibrary, value: Any, rank: Rank, start: int = 0) -> Any:
    """Return a random generator at a rank's own place in its stream.

    The master keeps the given generator: it draws the numbers of the serial program.

    Parameters
    ----------
    library : GraphLibrary
    value : object
        State of the generator.
    rank : Rank
    start : int
        Number of jumps that earlier workers have used.
    """
    n_jumps = (rank.number - rank.root) % rank.size
    return library.jump(value, start + n_jumps) if n_jumps else value


def _jump(shared: Any, rank: Rank, start: int) -> None:
    """Move a random generator to a rank's own place in its stream; see `jump_to_rank`."""
    library = library_of(shared)
    library.set_generator(shared, jump_to_rank(library, library.copy_generator(shared), rank, start))


def reset_jumps(session: Session, generators: Iterable[Any]) -> None:
    """Record that the user has set the generators: the ranks' streams restart from these states."""
    for shared in generators:
        _max_jumps[shared] = session.size - 1
