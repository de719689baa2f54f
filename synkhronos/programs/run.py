"""The command that runs a user's program on every rank.

The program and its arguments are pickled.  Functions, Data objects and shared variables are pickled as references,
which each rank replaces by local counterparts.  User code is pickled by name if all ranks have it (forked workers have
the code of the time of the fork), and by value otherwise.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from synkhronos import ranks
from synkhronos.collectives.commands import gather_pickles
from synkhronos.data_objects import Data
from synkhronos.data_objects.data_access import check_session, get_array_location, is_published
from synkhronos.functions import Function, get_dispatcher
from synkhronos.functions.computation import DEFAULT_VARIANT
from synkhronos.functions.rank_mean_context import RankMeanContext
from synkhronos.functions.slow_warning import warn_if_slow
from synkhronos.graph_libraries import list_loaded_libraries
from synkhronos.programs.local_function import LocalFunction
from synkhronos.programs.local_rows import LocalRows
from synkhronos.programs.rank_context import RankContext
from synkhronos.ranks import ArrayLocation, Command, Rank, Session
from synkhronos.ranks.program_memory import ProgramMemoryLayout
from synkhronos.ranks.program_peers import ProgramPeers
from synkhronos.replication.replicator import CodePickler, distribute_variables, pickle_by_value
from synkhronos.replication.settings import sync_settings
from synkhronos.replication.user_code import (
    QualifiedName,
    UserCode,
    find_outdated_names,
    get_qualified_name,
    import_hook_modules,
    is_importable,
    list_import_hook_modules,
)

#: Number of locks for any use, in addition to one for each rank's host; see `RankContext.lock`.
_N_EXTRA_LOCKS = 8


def run(program: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
    """Run a program on every rank, the master included, each at its own pace.

    Parameters
    ----------
    program : callable
        Function that each rank calls as ``program(context, *args, **kwargs)`` with its `RankContext`.  If it, or code
        that it calls, was defined or edited after `fork`, it is sent with copies of the global variables that it reads.
    *args, **kwargs
        Picklable arguments of the program.  A rank gets a `LocalFunction`, which computes on this rank alone, in place
        of a `Function`; `LocalRows` in place of a `Data` object; its own copy of a shared variable.

    Returns
    -------
    list
        Results of the program, in rank order.

    Raises
    ------
    TypeError
        If the program or an argument can't be pickled.  Then the program has not started.
    WorkerError
        If the program raises an exception on another rank, or if a worker dies.
    BaseException
        Any exception that the program raises on this rank.

    Notes
    -----
    If one rank fails, the program ends on all ranks: the others stop at their next wait, call of a compiled function
    or call of `RankContext.report_progress`.  ``fork(timeout=...)`` limits the seconds between two of these.

    Examples
    --------
    >>> import synkhronos as synk
    >>> n = synk.fork(3, use_gpu=False)
    >>> synk.run(repr)
    ['<synkhronos.RankContext 0 of 3>', '<synkhronos.RankContext 1 of 3>', '<synkhronos.RankContext 2 of 3>']
    >>> synk.close()
    """
    if not callable(program):
        raise TypeError(f"program: expected a function, got {program!r}")
    session = ranks.get_session()
    with session.call_lock:
        session.wait_until_idle()
        function_keys: list[Any] = []
        published_arrays: list[ArrayLocation] = []
        sync_settings(session)
        pickled_program = _pickle_program(session, (program, args, kwargs), function_keys, published_arrays)
        layout = ProgramMemoryLayout(0, session.size, session.size + _N_EXTRA_LOCKS)
        segment = session.memory.create_segment(layout.nbytes)
        layout = replace(layout, segment_key=segment.key)
        try:
            layout.initialize_locks(segment)
            keys, arrays = tuple(function_keys), tuple(published_arrays)
            command = RunProgram(layout, list_import_hook_modules(), pickled_program, keys, arrays)
            results: list[Any] = session.run(command)
        finally:
            session.memory.release("segment", layout.segment_key)
        return results


class _RunProgramFields(NamedTuple):
    program_layout: ProgramMemoryLayout
    hook_modules: tuple[str, ...]
    pickled_program: bytes
    function_keys: tuple[Any, ...]
    published_arrays: tuple[ArrayLocation, ...]


class RunProgram(_RunProgramFields, Command):
    """Run a program on every rank.

    ``function_keys`` are the keys of the functions among its arguments.  ``published_arrays`` are the locations of the
    Data objects among them whose rows the command sends to other hosts.
    """

    __slots__ = ()

    def run(self, rank: Rank) -> list[Any]:
        """Run the program on this rank; return all ranks' results in the master, an empty list in workers."""
        peers = ProgramPeers(rank, self.program_layout)
        self._compile_functions(rank)
        import_hook_modules(self.hook_modules)
        unpickler = _ProgramUnpickler(io.BytesIO(self.pickled_program))
        unpickler.rank, unpickler.peers = rank, peers
        try:
            program, args, kwargs = unpickler.load()
        except (AttributeError, ImportError) as error:
            raise TypeError(
                f"the program, or an argument, can't be unpickled on rank {rank.number}: {error}"
            ) from error
        peers.report_progress()
        with RankMeanContext.forbid():
            result = program(RankContext(rank, peers), *args, **kwargs)
        try:
            pickled_result = pickle.dumps(result, pickle.HIGHEST_PROTOCOL)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise TypeError(f"the result of the program can't be pickled: {error}") from error
        peers.barrier("the end of the program")
        return gather_pickles(rank, pickled_result, "the result of the program")

    def _compile_functions(self, rank: Rank) -> None:
        """Compile the functions among the arguments: first on the master, which writes the compiler's cache."""
        if not self.function_keys:
            return
        if rank.is_master:
            for key in self.function_keys:
                with warn_if_slow(f"compiling {rank.get_object(key).name}"):
                    rank.get_object(key).get_or_compile(DEFAULT_VARIANT)
        rank.barrier()
        for key in self.function_keys:
            rank.get_object(key).get_or_compile(DEFAULT_VARIANT)
        rank.thread_limit.apply()  # the compiled code may have loaded a BLAS


def _pickle_program(
    session: Session, program_call: tuple[Any, ...], function_keys: list[Any], published_arrays: list[ArrayLocation]
) -> bytes:
    """Pickle ``(program, args, kwargs)``, by value the code that a worker lacks.

    Append the keys of functions, and the locations of Data objects, among the arguments to the two lists.
    """
    outdated: set[QualifiedName] = set()
    while True:
        modules = {module for module, _ in outdated}
        stream, code = io.BytesIO(), UserCode(modules, covers_values=False)
        pickler = _ProgramPickler(stream, modules, code)
        pickler.outdated, pickler.session = outdated, session
        pickler.function_keys, pickler.published_arrays = function_keys, published_arrays
        try:
            with pickle_by_value(modules):
                pickler.dump(program_call)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise TypeError(f"the program and its arguments have to be pickled for the other ranks: {error}") from error
        code.update_digests()
        digests = code.list_digests()
        newly_outdated = session.run(FindOutdatedNames(list_import_hook_modules(), digests)) if digests else set()
        if not newly_outdated:
            return stream.getvalue()
        outdated |= newly_outdated


class _FindOutdatedNamesFields(NamedTuple):
    hook_modules: tuple[str, ...]
    digests: tuple[tuple[QualifiedName, bytes], ...]


class FindOutdatedNames(_FindOutdatedNamesFields, Command):
    """Find the names of user code that any worker lacks, or has in another version."""

    __slots__ = ()

    def run(self, rank: Rank) -> set[QualifiedName]:
        """Return the names, which are the same on all ranks."""
        import_hook_modules(self.hook_modules)
        outdated = () if rank.is_master else find_outdated_names(self.digests, covers_values=False)
        return set().union(*rank.all_gather_if_different(outdated))


class _ProgramPickler(CodePickler):
    """Pickler that replaces functions, Data objects and shared variables by references.

    Code is pickled by value if its name is in ``outdated``, rather than with its whole module: other code that a forked
    worker has keeps its state.
    """

    outdated: set[QualifiedName]
    session: Session
    function_keys: list[Any]
    published_arrays: list[ArrayLocation]

    def persistent_id(self, value: object) -> Any:
        if isinstance(value, Function):
            dispatcher = get_dispatcher(value)
            dispatcher.ensure_distributed(self.session)
            if dispatcher.computation_key not in self.function_keys:
                self.function_keys.append(dispatcher.computation_key)
            return "function", dispatcher.computation_key
        if isinstance(value, Data):
            check_session(value, self.session, "an argument")
            location = get_array_location(value)
            if is_published(value):
                self.published_arrays.append(location)
            return "data", location
        if getattr(value, "container", None) is not None and any(
            lib.is_shared(value) for lib in list_loaded_libraries()
        ):
            return "shared", distribute_variables(self.session, [value])[0]
        return None

    def _is_by_value(self, value: Any) -> bool:
        return get_qualified_name(value) in self.outdated or not is_importable(value)


class _ProgramUnpickler(pickle.Unpickler):
    """Unpickler that replaces references by this rank's local counterparts."""

    rank: Rank
    peers: ProgramPeers

    def persistent_load(self, reference: Any) -> Any:
        reference_type, key_or_location = reference
        if reference_type == "function":
            return LocalFunction(self.rank, self.peers, self.rank.get_object(key_or_location))
        if reference_type == "data":
            return LocalRows(self.rank, key_or_location)
        return self.rank.get_object(key_or_location)
