"""The shared variables and other objects of which every rank has a copy.

The master gives a shared variable a key when it first sends the variable.  Later pickles contain the key instead of the
variable.  User classes and functions are pickled by name where the workers can import the same code, and by value
otherwise (see `user_code`)::

    master                                            worker
    Replicator.send(objects, variables)
      pickle  ------ in shared memory ------------->  ReceiveObjects.run
      keys    ------------------------------------->  rank.add_object(key, object)
    rank.add_object(key, object, is_weak=True)        rank.get_object(key)

The master holds weak references: a variable that the user has dropped is released on all ranks.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import io
import itertools
import os
import pickle
import sys
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

import cloudpickle
import numpy as np

from synkhronos.checks import describe
from synkhronos.containers import BoundedCache, WeakKeyDict
from synkhronos.devices import find_device
from synkhronos.graph_libraries import get_library, list_loaded_libraries
from synkhronos.graph_libraries.library import get_storage, observe_set_value, set_value_callbacks
from synkhronos.ranks import ArrayLocation, Command, Rank, Session
from synkhronos.ranks.pickle_buffers import measure_buffers, read_buffers, write_buffers
from synkhronos.replication.random_streams import JumpStreams, jump_shared_to_rank, reserve_streams
from synkhronos.replication.settings import sync_settings
from synkhronos.replication.user_code import (
    CACHED_FUNCTION_TYPE,
    QualifiedName,
    UserCode,
    find_outdated_names,
    get_function_op_arguments,
    get_qualified_name,
    import_hook_modules,
    is_importable,
    is_user_module,
    list_import_hook_modules,
)
from synkhronos.variable_types import SharedVariable, Variable

#: Shared variables that functions of any session use.
_registered_shareds: WeakKeyDict[Any, bool] = WeakKeyDict()
#: Maximal number of bytes of a value that is kept after the user has replaced it.
_MAX_KEPT_NBYTES = 1 << 26
#: Numbers for the keys of shared variables.  No number is reused, since an old key may be released late.
_key_numbers = itertools.count(1)


def register_shareds(shareds: Iterable[SharedVariable]) -> None:
    """Register shared variables of a function, so that collectives accept them and may send them to the workers."""
    for shared in shareds:
        _registered_shareds[shared] = True


def is_registered(shared: SharedVariable) -> bool:
    """Whether a function uses the shared variable."""
    return shared in _registered_shareds


class SharedsOwner(ABC):
    """A sent object with shared variables, such as a `Computation`, which each rank moves to its device."""

    @abstractmethod
    def move_shareds_to_device(self) -> None:
        """Move the values of the shared variables to the device, if the device requires it."""


class CollectiveCache(BoundedCache[Any, Any]):
    """Commands of collectives on a single variable.

    The keys are a weak reference to the variable, the command's class and its arguments.  Setting a value on the master
    alone empties the cache, so that the next collective on the variable calls `Replicator.record_collective`.
    """


class Replicator:
    """Sends objects to the workers, and records which shared variables they have."""

    def __init__(self, session: Session):
        self._session = weakref.ref(session)
        self._keys: WeakKeyDict[Any, tuple[str, int]] = WeakKeyDict()
        #: User modules whose code is pickled by value, because a worker has another version or none.
        self._modules_by_value: set[str] = set()
        session.replacement_callbacks[self] = Replicator._separate_streams
        #: Number of values that the user has set on the master alone, by the variables' own ``set_value``.
        self.n_values_set_on_master = 0
        #: Values that the user has replaced on the master alone, None for long and unknown ones.  A collective on a
        #: variable removes its value.
        self._replaced_values: WeakKeyDict[Any, Any] = WeakKeyDict()
        #: Variables whose values the user lets differ between ranks, and those that a warning has named.
        self._unwatched_shareds: WeakKeyDict[Any, bool] = WeakKeyDict()
        set_value_callbacks[self] = Replicator._record_master_value

    @classmethod
    def get_or_create(cls, session: Session) -> Replicator:
        """Return the session's replicator."""
        return session.registry.get_or_create(cls, lambda: cls(session))

    def _separate_streams(self) -> None:
        """Move the random generators of new workers to streams of their own.

        The generators are copies of the master's, and would draw the same numbers.
        """
        session = self._session()
        assert session is not None
        if not session.has_forked_workers:
            return  # new processes have no variables yet; another replicator sends them
        generators = [shared for shared in self._keys if get_library(shared).is_generator(shared)]
        keys = [self._keys.get(shared) for shared in generators]
        offsets = [reserve_streams(session, shared) for shared in generators]
        if generators:
            session.run(JumpStreams(tuple(zip(keys, offsets, strict=True))))
        self._replaced_values = WeakKeyDict()  # new workers have the master's values

    # -- values of the master alone ------------------------------------------------------------------------------

    def _record_master_value(self, shared: SharedVariable, old_value: Any) -> None:
        """Record that the user has set a variable; within a command, all ranks may set theirs."""
        session = self._session()
        if session is None or session.close_reason is not None or session.is_inherited or session.is_in_command:
            return
        if session.size == 1 or self.get_key(shared) is None or shared in self._unwatched_shareds:
            return
        library = get_library(shared)
        if library.is_array(shared) and not library.is_generator(shared):
            if shared not in self._replaced_values:
                is_kept = old_value is not None and old_value.size * old_value.dtype.itemsize <= _MAX_KEPT_NBYTES
                self._replaced_values[shared] = old_value if is_kept else None
            self.n_values_set_on_master += 1
            session.registry.get_or_create(CollectiveCache).clear()

    def record_collective(self, shareds: Iterable[SharedVariable], makes_ranks_differ: bool) -> None:
        """Record that the user has used variables in a collective, and so doesn't need a warning of their values."""
        for shared in shareds:
            self._replaced_values.discard(shared)
            if makes_ranks_differ:
                self._unwatched_shareds[shared] = True

    def warn_of_master_values(
        self, name: str, read_shareds: Container[Any], written_shareds: Container[Any], stacklevel: int = 5
    ) -> None:
        """Warn, once for each, of variables that a function reads on all ranks and the user has set on the master."""
        session = self._session()
        assert session is not None
        for shared in self._replaced_values:
            if shared not in read_shareds and shared not in written_shareds:
                continue
            old_value = self._replaced_values.get(shared)
            self._replaced_values.discard(shared)
            is_known = old_value is not None and old_value is not get_storage(shared)[0]
            if shared not in read_shareds or (is_known and _has_value(shared, old_value)):
                continue  # replaced on all ranks, or restored
            if not session.run(CompareReplicas(self.get_key(shared))):
                self._unwatched_shareds[shared] = True
                warnings.warn(
                    f"{name} reads {describe(shared)}, which set_value() or as_theano() has changed on rank "
                    f"{session.rank.number} alone: synkhronos.broadcast() sends the value to all ranks; where ranks "
                    "should differ, use synkhronos.set_value() instead",
                    RuntimeWarning,
                    stacklevel=stacklevel,
                )

    def get_key(self, shared: SharedVariable) -> tuple[str, int] | None:
        """Return a shared variable's key, or None if the workers don't have the variable."""
        return self._keys.get(shared)

    def send(self, objects: Sequence[tuple[Any, Any]], variables: Sequence[Variable]) -> UserCode | None:
        """Copy objects with their keys to the workers, and the shared variables in them that the workers don't have.

        ``variables`` are all variables in the objects.  Return the user code in the pickle; None without
        workers.  Raise TypeError if a graph can't be pickled, or if a random generator can't jump; nothing has been
        sent then.
        """
        session = self._session()
        assert session is not None
        library = get_library(*variables[:1]) if variables else None
        shareds = library.find_shareds(variables) if library is not None else []
        keyed = [(("shared", next(_key_numbers)), shared) for shared in shareds if self.get_key(shared) is None]
        code = None
        if session.size > 1:
            sync_settings(session)
            offsets = [reserve_streams(session, shared) for _, shared in keyed]
            # The order is topological: pickle follows references, and would recurse through the depth of the graph.
            nodes = library.sort_nodes(variables) if library is not None else []
            code = self._send_objects(session, nodes, [*keyed, *objects], offsets)
        for key, shared in keyed:
            observe_set_value(type(shared))
            session.rank.add_object(key, shared, is_weak=True)
            session.memory.release_when_deleted(shared, "object", key)
            self._keys[shared] = key  # last: after an interrupt, the next call sends the variable again
        return code

    def _send_objects(
        self, session: Session, nodes: list[Any], objects: list[tuple[Any, Any]], offsets: list[int]
    ) -> UserCode:
        """Send objects with their keys until no worker has outdated modules.  Return the user code in the objects."""
        outdated: set[str] | None = None
        while outdated is None or outdated:
            code, pickled = self._pickle_into_shared_memory((nodes, objects, offsets))
            try:
                path = tuple(map(os.path.abspath, sys.path))
                hook_modules, digests = list_import_hook_modules(), code.list_digests()
                outdated = session.run(ReceiveObjects(pickled, sys.getrecursionlimit(), path, hook_modules, digests))
            except BaseException:
                for key, _ in objects:
                    session.memory.release("object", key)
                raise
            finally:
                session.memory.release("segment", pickled.segment_key)
            self._modules_by_value |= outdated
        return code

    def _pickle_into_shared_memory(self, value: object) -> tuple[UserCode, ArrayLocation]:
        """Pickle a value, with keys in place of shared variables that the workers have.  Return the user code in it.

        Raise TypeError if the value can't be pickled.
        """
        session = self._session()
        assert session is not None
        buffers: list[pickle.PickleBuffer] = []
        stream, code = io.BytesIO(), UserCode(self._modules_by_value)
        try:
            with pickle_by_value(self._modules_by_value):
                _GraphPickler(stream, self._keys, buffers, self._modules_by_value, code).dump(value)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise TypeError(
                f"the graph can't be pickled, as it has to be for the workers: {error}{self._format_advice()}"
            ) from error
        code.update_digests()
        parts: list[bytes | memoryview] = [stream.getvalue(), *(buffer.raw() for buffer in buffers)]
        nbytes = measure_buffers(parts)
        segment = session.memory.create_segment(nbytes)
        write_buffers(parts, memoryview(segment.buffer))
        return code, ArrayLocation(segment.key, "u1", (nbytes,))

    def _format_advice(self) -> str:
        """Return advice for an error's message if code of modules is pickled by value, or "" otherwise."""
        if not self._modules_by_value:
            return ""
        return (
            f" (the workers have another version of {', '.join(sorted(self._modules_by_value))}, or none, so that its "
            "code has to be sent: call synkhronos.close() and synkhronos.fork() again for workers that have the "
            "present one)"
        )


def distribute_variables(
    session: Session, variables: Sequence[SharedVariable], makes_ranks_differ: bool = False
) -> tuple[Any, ...]:
    """Send a collective's variables to the workers that lack them, and return the variables' keys.

    Callers first check all arguments, since a call that raises must not send copies to the workers.
    ``makes_ranks_differ`` is whether the collective gives each rank values of its own.
    """
    replicator = Replicator.get_or_create(session)
    replicator.record_collective(variables, makes_ranks_differ)
    missing = [variable for variable in variables if replicator.get_key(variable) is None]
    if missing:
        replicator.send([], missing)
    return tuple(replicator.get_key(variable) for variable in variables)


@dataclass(frozen=True, slots=True)
class CompareReplicas(Command):
    """Compare all ranks' values of a shared variable, bit by bit."""

    key: Any

    def run(self, rank: Rank) -> bool:
        value = _to_numpy(get_storage(rank.get_object(self.key))[0])
        digest = hashlib.blake2b(value.tobytes(), digest_size=16).digest()
        return rank.compare_digests(rank.compute_digest((value.shape, str(value.dtype), digest)))


def _has_value(shared: SharedVariable, value: Any) -> bool:
    """Whether the array of a shared variable, on any device, is equal to another."""
    return np.array_equal(_to_numpy(get_storage(shared)[0]), _to_numpy(value), equal_nan=True)


def _to_numpy(value: Any) -> np.ndarray:
    return find_device(value).to_numpy(value)


@dataclass(frozen=True, slots=True)
class ReceiveObjects(Command):
    """Unpickle objects on the workers.

    The pickle has nodes, pairs of key and object, and for each shared variable the number of jumps before the ranks'
    streams.  The other fields are the master's; users raise the recursion limit to compile deep graphs.
    """

    location: ArrayLocation
    recursion_limit: int
    sys_path: tuple[str, ...]
    hook_modules: tuple[str, ...]
    digests: tuple[tuple[QualifiedName, bytes], ...]

    def run(self, rank: Rank) -> set[str]:
        """Store the objects, and let their random generators jump to this rank's streams.

        Return the modules whose code differs on any rank.  If there are any, no rank stores objects.
        """
        if not rank.is_master:
            sys.setrecursionlimit(max(self.recursion_limit, sys.getrecursionlimit()))
            # The pickle may name any module that the master can import now.
            sys.path[:] = self.sys_path
            importlib.invalidate_caches()
            import_hook_modules(self.hook_modules)
        if self.digests:
            outdated = () if rank.is_master else find_outdated_names(self.digests)
            outdated_anywhere = set().union(*rank.all_gather_if_different(outdated))
            if outdated_anywhere:
                return {module for module, _ in outdated_anywhere}
        if rank.is_master:
            return set()
        stream, *arrays = read_buffers(self.location.view(rank.segments).data)
        # The arrays are copied into this process's own memory, since the segment is released.
        unpickler = _Unpickler(io.BytesIO(stream), buffers=[np.array(array) for array in arrays])
        unpickler.rank = rank
        _, values, offsets = unpickler.load()
        for key, value in values:
            rank.add_object(key, value)
        for (_, shared), offset in zip(values, offsets, strict=False):
            if get_library(shared).is_generator(shared):
                jump_shared_to_rank(shared, rank, offset)
        for _, value in values[len(offsets) :]:
            if isinstance(value, SharedsOwner):
                value.move_shareds_to_device()
        return set()


@contextlib.contextmanager
def pickle_by_value(modules: Iterable[str]) -> Iterator[None]:
    """Let cloudpickle pickle the code of these modules by value in the ``with`` block."""
    before = cloudpickle.list_registry_pickle_by_value()
    added = [sys.modules[name] for name in modules if name in sys.modules and name not in before]
    try:
        for module in added:
            cloudpickle.register_pickle_by_value(module)
        yield
    finally:
        for module in added:
            cloudpickle.unregister_pickle_by_value(module)


class CodePickler(cloudpickle.Pickler):
    """Pickler that pickles the user's classes and functions by name, and by value those that workers lack.

    They are appended to ``code``.  ``modules_by_value`` are pickled by value.
    """

    def __init__(
        self, stream: io.BytesIO, modules_by_value: Container[str], code: UserCode, buffer_callback: Any = None
    ):
        super().__init__(stream, pickle.HIGHEST_PROTOCOL, buffer_callback=buffer_callback)
        self._modules_by_value, self._code = modules_by_value, code

    def reducer_override(self, value: object) -> Any:
        """Return the name of a user's class or function, or its content; `pickle` calls this for most objects."""
        if isinstance(value, (type, FunctionType, CACHED_FUNCTION_TYPE)) and is_user_module(value.__module__):
            is_by_value = self._is_by_value(value)
            self._code.add(value, not is_by_value)
            if not is_by_value:
                return value.__qualname__
            if isinstance(value, CACHED_FUNCTION_TYPE):  # pickle would send its name
                return _cache_function, (value.__wrapped__, value.cache_parameters())
        if (arguments := get_function_op_arguments(value)) is not None and is_user_module(arguments[0].__module__):
            is_by_value = self._is_by_value(value)
            self._code.add(value, not is_by_value)
            if is_by_value:
                return type(value), arguments
        if isinstance(value, ModuleType) and value.__name__ in self._modules_by_value:
            # Cloudpickle's way would recurse without end for modules that import each other.
            state = {name: content for name, content in vars(value).items() if not name.startswith("__")}
            return ModuleType, (value.__name__,), state, None, None, _update_module
        return super().reducer_override(value)

    def _is_by_value(self, value: Any) -> bool:
        return get_qualified_name(value)[0] in self._modules_by_value or not is_importable(value)


class _GraphPickler(CodePickler):
    """Pickler that replaces shared variables by keys, and appends arrays to ``buffers`` instead of the stream."""

    def __init__(
        self, stream: io.BytesIO, keys: Any, buffers: list[pickle.PickleBuffer], by_value: set[str], code: UserCode
    ):
        super().__init__(stream, by_value, code, buffers.append)
        self._keys = keys
        libraries = list_loaded_libraries()
        self._variable_classes = tuple(library.variable_class for library in libraries)
        self._shared_classes = tuple(library.shared_class for library in libraries)

    def reducer_override(self, value: object) -> Any:
        if isinstance(value, self._variable_classes) and not isinstance(value, self._shared_classes):
            return _reduce_without_user_attributes(value)
        # Unpickling a device's array could start the device's runtime in the wrong process.
        if (device := find_device(value)).must_move_shared_values:
            return device.to_numpy(value).__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return super().reducer_override(value)

    def persistent_id(self, value: object) -> Any:
        if getattr(value, "container", None) is None:  # fast path: pickle calls this for every object
            return None
        try:
            return self._keys.get(value)
        except TypeError:
            return None


def _reduce_without_user_attributes(variable: Variable) -> tuple[Any, ...]:
    """Return pickle's reduction of a variable, without the attributes that its library does not set.

    Compiling drops them as well, since it clones the graph.  They may refer to objects that can't be pickled.
    """
    function, arguments, *others = variable.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    if others and others[0]:  # a loop's inner variables are pickled without a state
        own_attributes = vars(variable.clone())
        others[0] = {name: value for name, value in others[0].items() if name in own_attributes}
    return function, arguments, *others


def _update_module(module: ModuleType, state: dict[str, Any]) -> None:
    vars(module).update(state)


def _cache_function(function: FunctionType, parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


class _Unpickler(pickle.Unpickler):
    rank: Rank

    def persistent_load(self, key: Any) -> Any:
        return self.rank.get_object(key)
