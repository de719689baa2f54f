"""The command that runs a user's program on every rank.

The program and its arguments are pickled once.  Functions, Data objects and shared variables among them are pickled as
references, which each rank replaces by its local counterpart.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import cloudpickle
import numpy as np

from synkhronos import ranks
from synkhronos.collectives.arguments import get_mirror_keys
from synkhronos.data import Data
from synkhronos.data.shared import check_session, is_published, to_shared_array
from synkhronos.devices import HOST
from synkhronos.function import Function, get_dispatcher
from synkhronos.function.computation import DEFAULT_VARIANT
from synkhronos.function.rank_mean import RankMeans
from synkhronos.function.slow_warning import warn_if_slow
from synkhronos.graphs import list_loaded_libraries
from synkhronos.graphs.mirror import get_object
from synkhronos.ranks import Command, Rank, Session, SharedArray
from synkhronos.ranks.rank_task import RankTask
from synkhronos.ranks.task_memory import TaskMemory
from synkhronos.tasks.local_function import LocalFunction, LocalRows
from synkhronos.tasks.worker import Worker

#: Number of locks in addition to one for each rank.
_EXTRA_LOCKS = 8


def run(program: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
    """Run a program on every rank, the master included, each at its own pace.

    Parameters
    ----------
    program : callable
        Function that each rank calls as ``program(worker, *args, **kwargs)`` with its `Worker`.  The other ranks have
        to find it by name: use a function of a module, or one that the script defines before `fork`.
    *args, **kwargs
        Arguments of the program, which have to be picklable.  Instead of a `Function` a rank gets a `LocalFunction`,
        which computes on that rank alone; instead of a `Data` object `LocalRows`; instead of a shared variable its own
        copy.

    Returns
    -------
    list
        Results of the program, in rank order.

    Raises
    ------
    TypeError
        If the program or an argument can't be pickled.  Nothing has run then.
    WorkerError
        If the program has raised on another rank, or that rank has died.
    BaseException
        Any exception that the program has raised on this rank.

    Notes
    -----
    If one rank fails, the program ends on all ranks.  The other ranks stop at their next call of a compiled function,
    wait, or call of `Worker.progress`.  With ``fork(timeout=...)`` a rank may take that many seconds from one such call
    to the next.

    Examples
    --------
    >>> import synkhronos as synk
    >>> n = synk.fork(3, use_gpu=False)
    >>> synk.run(repr)
    ['<synkhronos.Worker 0 of 3>', '<synkhronos.Worker 1 of 3>', '<synkhronos.Worker 2 of 3>']
    >>> synk.close()
    """
    if not callable(program):
        raise TypeError(f"program: expected a function, got {program!r}")
    session = ranks.get_session()
    with session.call_lock:
        session.wait_until_idle()
        functions: list[Any] = []
        arrays: list[SharedArray] = []
        payload = _pickle_program(session, (program, args, kwargs), functions, arrays)
        memory = TaskMemory(0, session.size, session.size + _EXTRA_LOCKS)
        segment = session.memory.create(memory.nbytes)
        memory = replace(memory, key=segment.key)
        try:
            memory.initialise_locks(segment)
            results: list[Any] = session.run(RunProgram(memory, payload, tuple(functions), tuple(arrays)))
        finally:
            session.memory.release("segment", memory.key)
        return results


class _RunProgramFields(NamedTuple):
    task_memory: TaskMemory
    payload: bytes
    functions: tuple[Any, ...]
    arrays: tuple[SharedArray, ...]


class RunProgram(_RunProgramFields, Command):
    """Run a program on every rank.

    Attributes
    ----------
    task_memory : TaskMemory
    payload : bytes
        Pickled program and arguments.
    functions : tuple
        Keys of the functions among the arguments.
    arrays : tuple of SharedArray
        Data objects among the arguments whose rows are sent to other hosts.
    """

    __slots__ = ()

    def run(self, rank: Rank) -> list[Any]:
        """Run the program on this rank; return all ranks' results in the master, an empty list in workers."""
        task = RankTask(rank, self.task_memory)
        self._compile(rank)
        unpickler = _ProgramUnpickler(io.BytesIO(self.payload))
        unpickler.rank, unpickler.task = rank, task
        try:
            program, args, kwargs = unpickler.load()
        except (AttributeError, ImportError) as error:
            raise TypeError(
                f"the program, or an argument, can't be found on rank {rank.number}: {error}; define it in a module; "
                "in the script, before synkhronos.fork(), is enough where JAX didn't run before that"
            ) from error
        task.progress()
        with RankMeans.forbid():
            result = program(Worker(rank, task), *args, **kwargs)
        try:
            payload = pickle.dumps(result, pickle.HIGHEST_PROTOCOL)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise TypeError(f"the result of the program can't be pickled: {error}") from error
        task.barrier("the end of the program")
        return self._gather_results(rank, payload)

    def _gather_results(self, rank: Rank, payload: bytes) -> list[Any]:
        """Gather the pickled results of all ranks in the master."""
        lengths = rank.all_gather(len(payload))
        layouts = [((length,), np.dtype(np.uint8)) for length in lengths]
        out = [np.empty(*layout) for layout in layouts] if rank.is_master else None
        HOST.get_communicator(rank).gather(np.frombuffer(payload, np.uint8), rank.root, layouts, out)
        return [] if out is None else [pickle.loads(pickled.data) for pickled in out]

    def _compile(self, rank: Rank) -> None:
        """Compile the functions among the arguments: on the master first, which fills the compiler's cache."""
        if not self.functions:
            return
        if rank.is_master:
            for key in self.functions:
                with warn_if_slow(f"compiling {get_object(rank, key).name}"):
                    get_object(rank, key).compile(DEFAULT_VARIANT)
        rank.barrier()
        for key in self.functions:
            get_object(rank, key).compile(DEFAULT_VARIANT)
        rank.thread_limit.apply()  # the compiled code may have loaded a BLAS


def _pickle_program(session: Session, value: Any, functions: list[Any], arrays: list[SharedArray]) -> bytes:
    """Pickle the program and its arguments; append to the lists the functions and Data objects among them."""
    stream = io.BytesIO()
    pickler_class = _ProgramPickler if session.workers.are_forks else _ValuePickler
    pickler = pickler_class(stream, pickle.HIGHEST_PROTOCOL)
    pickler.session, pickler.functions, pickler.arrays = session, functions, arrays
    try:
        pickler.dump(value)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"the program and its arguments have to be pickled for the other ranks: {error}; a program has to be a "
            "function of a module, or one that the script defines before synkhronos.fork()"
        ) from error
    return stream.getvalue()


class _ProgramPickler(pickle.Pickler):
    """A pickler that replaces functions, Data objects and shared variables by references."""

    session: Session
    functions: list[Any]
    arrays: list[SharedArray]

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, Function):
            dispatcher = get_dispatcher(value)
            dispatcher.ensure_distributed(self.session)
            if dispatcher.key not in self.functions:
                self.functions.append(dispatcher.key)
            return "function", dispatcher.key
        if isinstance(value, Data):
            check_session(value, self.session, "an argument")
            location = to_shared_array(value)
            if is_published(value):
                self.arrays.append(location)
            return "data", location
        if getattr(value, "container", None) is not None and any(
            lib.is_shared(value) for lib in list_loaded_libraries()
        ):
            return "shared", get_mirror_keys(self.session, [value])[0]
        return None


class _ValuePickler(cloudpickle.Pickler, _ProgramPickler):
    """Pickler for spawned workers: functions and classes that the script defines are pickled by value."""


class _ProgramUnpickler(pickle.Unpickler):
    """An unpickler that replaces references by this rank's local counterparts."""

    rank: Rank
    task: RankTask

    def persistent_load(self, reference: Any) -> Any:
        kind, key = reference
        if kind == "function":
            return LocalFunction(self.rank, self.task, get_object(self.rank, key))
        if kind == "data":
            return LocalRows(self.rank, key)
        return get_object(self.rank, key)
