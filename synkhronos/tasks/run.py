"""Runs a program on every rank, each at its own pace.

`run`
    What users call.
`Program`
    The command.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from synkhronos import ranks
from synkhronos.collectives.arguments import get_mirror_keys
from synkhronos.data import Data
from synkhronos.devices import HOST
from synkhronos.function import Function
from synkhronos.function.notice import warn_if_slow
from synkhronos.function.program import PLAIN
from synkhronos.graphs import loaded_libraries
from synkhronos.graphs.mirror import get_object
from synkhronos.ranks import Command, Rank, Session, SharedArray
from synkhronos.ranks.task import Task, TaskMemory
from synkhronos.tasks.local import LocalFunction, LocalRows
from synkhronos.tasks.worker import Worker

#: Locks beside one for each rank.
_LOCKS = 8


def run(program: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
    """Run a program on every rank, this one's included, each at its own pace.

    Parameters
    ----------
    program : callable
        Called on each rank as ``program(worker, *args, **kwargs)`` with its `Worker`.  The other ranks have to find it:
        take a function of a module, or one that the script defines before `fork`.
    *args, **kwargs
        Arguments of the program, which have to be picklable.  For a `Function` a rank gets a `LocalFunction`, which
        computes on that rank alone; for a `Data` object a `LocalRows`; for a shared variable its own copy.

    Returns
    -------
    list
        The program's results, in rank order.

    Raises
    ------
    TypeError
        If the program or an argument can't be pickled; nothing has run then.
    WorkerError
        If the program has raised on another rank, or that rank has died.
    BaseException
        Any exception that the program has raised on this rank.

    Notes
    -----
    A rank that fails ends the program on all ranks.  The others stop when they next call a compiled function, wait for
    others, or call `Worker.progress`.  With ``fork(timeout=...)`` that many seconds may pass between two such calls of
    a rank.

    Examples
    --------
    >>> import synkhronos as synk
    >>> from synkhronos.tasks import examples
    >>> n = synk.fork(3, use_gpu=False)
    >>> for greeting in synk.run(examples.greet, "hello"):
    ...     print(greeting)
    hello from rank 0 of 3
    hello from rank 1 of 3
    hello from rank 2 of 3
    >>> synk.close()
    """
    if not callable(program):
        raise TypeError(f"program: expected a function, got {program!r}")
    session = ranks.session()
    with session.turn:
        session.settle()
        functions: list[Any] = []
        arrays: list[SharedArray] = []
        payload = _pack(session, (program, args, kwargs), functions, arrays)
        memory = TaskMemory(0, session.size, session.size + _LOCKS)
        segment = session.memory.create(memory.nbytes)
        memory = replace(memory, key=segment.key)
        try:
            memory.prepare(segment)
            results: list[Any] = session.run(Program(memory, payload, tuple(functions), tuple(arrays)))
        finally:
            session.memory.release("segment", memory.key)
        return results


class _ProgramFields(NamedTuple):
    memory: TaskMemory
    payload: bytes
    functions: tuple[Any, ...]
    arrays: tuple[SharedArray, ...]


class Program(_ProgramFields, Command):
    """Run a program on every rank.

    Attributes
    ----------
    memory : TaskMemory
    payload : bytes
        The pickled program and its arguments.
    functions : tuple
        The keys of the functions among these.
    arrays : tuple
        Where the Data objects among these lie.
    """

    __slots__ = ()

    def run(self, rank: Rank) -> list[Any]:
        """Run it on this rank; the master returns all ranks' results."""
        task = Task(rank, self.memory)
        self._compile(rank)
        unpickler = _Unpickler(io.BytesIO(self.payload))
        unpickler.rank, unpickler.task = rank, task
        try:
            program, args, kwargs = unpickler.load()
        except (AttributeError, ImportError) as error:
            raise TypeError(
                f"the program, or an argument, can't be found on rank {rank.number}: {error}; define it in a module; "
                "in the script, before synkhronos.fork(), is enough where JAX didn't run before that"
            ) from error
        task.progress()
        result = program(Worker(rank, task), *args, **kwargs)
        try:
            payload = pickle.dumps(result, pickle.HIGHEST_PROTOCOL)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise TypeError(f"the program has returned what can't be pickled: {error}") from error
        task.meet("the end of the program")
        return self._gathered(rank, payload)

    def _gathered(self, rank: Rank, payload: bytes) -> list[Any]:
        """Return, in the master, what each rank has pickled: it alone needs room for all."""
        lengths = rank.exchange(len(payload))
        layouts = [((length,), np.dtype(np.uint8)) for length in lengths]
        room = [np.empty(*layout) for layout in layouts] if rank.is_master else None
        HOST.communicator(rank).gather(np.frombuffer(payload, np.uint8), rank.root, layouts, room)
        return [] if room is None else [pickle.loads(each.data) for each in room]

    def _compile(self, rank: Rank) -> None:
        """Compile what the program may call: the master first, who fills the compiler's cache."""
        if not self.functions:
            return
        if rank.is_master:
            for key in self.functions:
                with warn_if_slow(f"compiling {get_object(rank, key).name}"):
                    get_object(rank, key).compile(PLAIN)
        rank.barrier()
        for key in self.functions:
            get_object(rank, key).compile(PLAIN)
        rank.threads.limit()  # what was compiled may have brought a BLAS with it


def _pack(session: Session, value: Any, functions: list[Any], arrays: list[SharedArray]) -> bytes:
    """Pickle what the program gets, and note the keys of the functions in it, and where its Data objects lie."""
    stream = io.BytesIO()
    pickler = _Pickler(stream, pickle.HIGHEST_PROTOCOL)
    pickler.session, pickler.functions, pickler.arrays = session, functions, arrays
    try:
        pickler.dump(value)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"the program and its arguments have to be pickled for the other ranks: {error}; a program has to be a "
            "function of a module, or one that the script defines before synkhronos.fork()"
        ) from error
    return stream.getvalue()


class _Pickler(pickle.Pickler):
    """Says the key of what the ranks have."""

    session: Session
    functions: list[Any]
    arrays: list[SharedArray]

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, Function):
            value._ensure_distributed(self.session)
            if value._key not in self.functions:
                self.functions.append(value._key)
            return "function", value._key
        if isinstance(value, Data):
            value._check_session(self.session, "an argument")
            location = value._location()
            if value._is_published:
                self.arrays.append(location)
            return "data", location
        if getattr(value, "container", None) is not None and any(lib.is_shared(value) for lib in loaded_libraries()):
            return "shared", get_mirror_keys(self.session, [value])[0]
        return None


class _Unpickler(pickle.Unpickler):
    rank: Rank
    task: Task

    def persistent_load(self, found: Any) -> Any:
        kind, what = found
        if kind == "function":
            return LocalFunction(self.rank, self.task, get_object(self.rank, what))
        if kind == "data":
            return LocalRows(self.rank, what)
        return get_object(self.rank, what)
