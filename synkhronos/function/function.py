"""Functions that run on all ranks: the class that users call, its constructor, and the distribution to the workers.

The state of a function in a session::

    created ── distribute(), or the first call ──> distributed ── the user's code changes, or fork() again ──> created

The workers get a function's `Program` when it is distributed.  Each rank compiles a variant of it in the first call
that needs this variant.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import pickle
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from synkhronos import ranks
from synkhronos.checks import check_at_least, check_integer
from synkhronos.data import Data, data
from synkhronos.devices import find_device
from synkhronos.function.build import build_program, is_single
from synkhronos.function.call import Call
from synkhronos.function.inputs import CallInputs, has_only_slices
from synkhronos.function.program import PLAIN, Program, Variant
from synkhronos.graphs.mirror import Mirror, register_shareds
from synkhronos.ranks import Session, WeakKeys

_keys = itertools.count()


class Function:
    """A function that runs on all ranks at once, made by `synkhronos.function`; see `__call__`.

    Two functions that share a variable share its value on each rank.  A copy has the same shared variables.  A deep
    copy, or an unpickled function, has copies of them with their values in the master.
    """

    def __init__(self, program: Program, single: bool):
        self._program = program
        self._single = single
        self._key = ("function", next(_keys))
        self._session: Session | None = None  # to whose workers the program was sent
        self._compiled: set[Variant] = set()  # on all ranks
        self._inputs = CallInputs(program)

    # -- attributes ------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """Name of the function in messages."""
        return self._program.name

    @property
    def output_modes(self) -> list[str | None]:
        """Reduction op of each output, None for the master's own value."""
        return [op.spelling for op in self._program.output_ops]

    @property
    def update_modes(self) -> list[str | None]:
        """Op of each update, by which `num_slices` accumulates its values."""
        return [op.spelling for op in self._program.update_ops]

    def __repr__(self) -> str:
        names = ", ".join(entry.name or "_" for entry in self._program.inputs)
        return f"<synkhronos.Function {self.name}({names}) -> {self.output_modes}>"

    def get_shared(self) -> list[Any]:
        """Return the shared variables that the function reads or updates."""
        return self._program.list_shareds()

    # -- copies ----------------------------------------------------------------------------------------------

    def __copy__(self) -> Function:
        return _make_function(copy.copy(self._program), self._single)

    def __reduce__(self) -> Any:
        # The nodes in topological order: otherwise pickle would recurse as deep as the graph is.
        program = self._program
        return _unpickle_function, (program.library.sort_nodes(program.list_variables()), program, self._single)

    def __deepcopy__(self, memo: dict[int, Any]) -> Function:
        program = self._program
        make, arguments = self.__reduce__()
        for shared in self.get_shared():
            # PyTensor's containers can pickle arrays of devices, but not copy them.
            if find_device(program.library.get(shared)).moves_shareds and id(shared.container) not in memo:
                memo[id(shared.container)] = pickle.loads(pickle.dumps(shared.container))
        made: Function = make(*copy.deepcopy(arguments, memo))
        return made

    # -- calls -----------------------------------------------------------------------------------------------

    def __call__(
        self,
        *inputs: Any,
        batch: Any = None,
        batch_s: Any = None,
        num_slices: int = 1,
        output_subset: Sequence[int] | None = None,
        **named_inputs: Any,
    ) -> Any:
        """Run on all ranks and return the reduced outputs.

        Parameters
        ----------
        *inputs : Data or array_like
            In the order of ``inputs`` and then ``bcast_inputs``.  Arrays other than Data are copied into shared memory,
            which the function uses again in the next call.
        batch : int, slice, list of int, or array of int or bool, optional
            Rows of the scattered inputs to use: a number of rows from the first, a slice, indexes, or a mask.  They are
            selected before they are divided among the ranks.  Default: all rows.
        batch_s : slice or list of int, or a list of these with one for each rank, optional
            Rows of its own ``sliceable_shareds`` that each rank uses.  Default: all rows.
        num_slices : int
            Number of slices in which each rank computes its rows; more slices take less memory.
        output_subset : sequence of int, optional
            Indexes of the outputs to compute and return.  Default: all outputs.
        **named_inputs
            Inputs by the names of their variables.

        Returns
        -------
        ndarray, or list of ndarray
            A list if ``outputs`` was one.  In JAX mode `Result` objects: the call returns before the ranks have
            computed, and a `Result` waits for its array when it is used.

        Raises
        ------
        TypeError, ValueError, IndexError
            For wrong arguments, before any rank starts.
        WorkerError
            If a worker raised an exception, or died.

        Notes
        -----
        Each rank gets a contiguous run of the selected rows, in rank order, as evenly as possible.  A rank without rows
        sits out: it updates nothing, and counts in no op.

        Examples
        --------
        >>> import numpy as np, pytensor.tensor as pt, synkhronos as synk
        >>> n = synk.fork(2, use_gpu=False)
        >>> x = pt.dvector("x")
        >>> f = synk.function([x], [(x.sum(), "sum"), (x * 2, "gather")])
        >>> total, doubled = f(np.arange(5.0))
        >>> float(total), doubled.tolist()
        (10.0, [0.0, 2.0, 4.0, 6.0, 8.0])
        >>> f(np.arange(5.0), batch=[4, 0], output_subset=[1])
        [array([8., 0.])]
        >>> synk.close()
        """
        session = ranks.session()
        with session.turn:
            session.settle()
            call = self._prepare(session, inputs, named_inputs, batch, batch_s, num_slices, output_subset)
            return self._get_results(session, call, session.run(call))

    def _call_and_read(self, *inputs: Any, num_slices: int = 1) -> Any:
        """Call the function and read its outputs in one command: arrays in JAX mode too, instead of `Result`."""
        session = ranks.session()
        with session.turn:
            session.settle()
            call = self._prepare(session, inputs, {}, None, None, num_slices, None)._replace(reads_outputs=True)
            return self._get_results(session, call, session.run(call))

    def _call_in_turn(self, session: Session) -> Any:
        """Call the function without arguments, by a caller that holds the session's turn."""
        call = self._prepare(session, (), {}, None, None, 1, None)
        return self._get_results(session, call, session.run(call))

    def _prepare(
        self,
        session: Session,
        inputs: Sequence[Any],
        named_inputs: dict[str, Any],
        batch: Any,
        batch_s: Any,
        num_slices: int,
        output_subset: Sequence[int] | None,
    ) -> Call:
        """Check the arguments of a call, put the inputs into shared memory, and return the command.

        The caller holds the session's turn until it has passed the command's result to `_get_results`.
        """
        variant = self._choose_variant(batch_s, num_slices, output_subset)
        shared_inputs, n_rows = self._inputs.share_inputs(session, inputs, named_inputs, batch)
        shared_batch_s = None if batch_s is None else self._inputs.share_batch_s(session, batch_s)
        has_updates = bool(self._program.updates)
        try:
            self._ensure_distributed(session)
            self._program.engine.before_call(session)
        except Exception as error:
            if has_updates:  # errors of later stages have such a note too
                error.add_note("The function's updates were applied on no rank.")
            raise
        needs_compile = variant not in self._compiled
        return Call(self._key, variant, needs_compile, shared_inputs, n_rows, shared_batch_s, num_slices, has_updates)

    def _max_repeats(self, dtype: np.dtype) -> int:
        """Return how many calls one launch can fuse, each followed by an all-reduce of arrays of a dtype."""
        return self._program.engine.max_repeats(dtype)

    def _get_outputs(self, session: Session, call: Call, collected: Any) -> list[Any]:
        """Return the outputs in a list, from the result of the command; a fused launch has several of each output."""
        self._compiled.add(call.variant)
        results = collected
        if collected and not call.reads_outputs:
            results = self._program.engine.to_results(session, collected)
        return [np.asarray(result) if isinstance(result, np.generic) else result for result in results]

    def _get_results(self, session: Session, call: Call, collected: Any) -> Any:
        """Return the outputs as the user grouped them, from the result of the command."""
        results = self._get_outputs(session, call, collected)
        return results[0] if self._single and results else results

    def as_theano(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph library's plain function in the master alone, on all rows.

        Parameters
        ----------
        *args, **kwargs
            Data objects or arrays, as for the plain function.

        Returns
        -------
        ndarray, or list of ndarray
            Nothing is scattered or reduced; updates change the master's shared variables only.
        """
        plain = [np.asarray(arg) if isinstance(arg, Data) else arg for arg in args]
        named = {key: np.asarray(arg) if isinstance(arg, Data) else arg for key, arg in kwargs.items()}
        result = self._program.compile(PLAIN).function(*plain, **named)
        if isinstance(result, list | tuple):
            return result[0] if self._single else list(result)
        return [] if result is None else result if self._single else [result]

    def build_inputs(
        self,
        *args: npt.ArrayLike,
        force_cast: bool = False,
        oversize: float = 1.0,
        minibatch: bool | Sequence[bool] = False,
        **named: npt.ArrayLike,
    ) -> Data | list[Data]:
        """Create Data objects for the function's inputs.

        Parameters
        ----------
        *args : array_like
            A value for each input, in order.
        force_cast, oversize
            As in `synkhronos.data`.
        minibatch : bool or sequence of bool
            Flag of all inputs, or one for each; see `Data.minibatch`.
        **named : array_like
            Values by the names of inputs.

        Returns
        -------
        Data, or list of Data
            In the order of the inputs; for a function of one input the Data object itself.

        Examples
        --------
        >>> import numpy as np, pytensor.tensor as pt, synkhronos as synk
        >>> n = synk.fork(2, use_gpu=False)
        >>> f = synk.function([pt.fmatrix("x")])
        >>> f.build_inputs(np.ones((4, 2)), force_cast=True)
        <synkhronos.Data 'x': float32, shape (4, 2)>
        >>> synk.close()
        """
        ranks.session()
        values = self._inputs.bind_arguments(args, named)
        entries = self._program.inputs
        if isinstance(minibatch, list | tuple):
            if len(minibatch) != len(entries):
                raise ValueError(f"minibatch: expected one flag for each of {len(entries)} inputs, got {minibatch!r}")
            flags = list(minibatch)
        else:
            flags = [minibatch] * len(entries)
        made = [
            data(value, var=entry.variable, minibatch=flag, force_cast=force_cast, oversize=oversize, name=entry.name)
            for value, entry, flag in zip(values, entries, flags, strict=True)
        ]
        return made[0] if len(made) == 1 else made

    # -- variants --------------------------------------------------------------------------------------------

    def _choose_variant(self, batch_s: Any, num_slices: Any, output_subset: Any) -> Variant:
        if batch_s is None and output_subset is None and type(num_slices) is int and num_slices == 1:
            return PLAIN
        program = self._program
        num_slices = check_at_least(num_slices, "num_slices", 1)
        if num_slices > 1:
            if not program.n_scattered and not program.sliceable:
                raise ValueError(
                    f"num_slices={num_slices}: {self.name} has no scattered inputs and no sliceable_shareds to cut"
                )
            for shared, op in program.list_accumulated_updates():
                if not program.library.is_array(shared):
                    if op.name is not None:
                        raise TypeError(
                            f"num_slices={num_slices}: the update of {shared.name!r} of type {shared.type} can't be "
                            "accumulated; give it the op None, which keeps the value of the last slice"
                        )
                elif op.name is not None and not op.reduction.can_reduce(np.dtype(shared.type.dtype)):
                    raise ValueError(
                        f"num_slices={num_slices}: op {op.spelling!r} of the update of {shared.name!r} is not defined "
                        f"for dtype {shared.type.dtype}; give the update another op"
                    )
        row_inputs = None
        if batch_s is not None and not program.sliceable:
            raise ValueError(f"batch_s: {self.name} was made without sliceable_shareds")
        if program.sliceable and (batch_s is not None or num_slices > 1):
            for shared in program.sliceable:
                if any(shared is updated for updated, _ in program.updates + program.default_updates):
                    argument = "num_slices" if batch_s is None else "batch_s"
                    raise ValueError(
                        f"{argument}: {self.name} updates {shared.name!r}, which is one of its sliceable_shareds: the "
                        "update would replace all rows by values of the selected rows; update another variable, or "
                        "leave this one out of sliceable_shareds"
                    )
            is_contiguous = batch_s is None or has_only_slices(batch_s)
            row_inputs = "slice" if is_contiguous and not program.engine.fixed_lengths else "index"
        return Variant(row_inputs, bool(num_slices > 1), self._check_subset(output_subset))

    def _check_subset(self, output_subset: Any) -> tuple[int, ...] | None:
        if output_subset is None:
            return None
        if not isinstance(output_subset, list | tuple | np.ndarray | range):
            raise TypeError(f"output_subset: expected a list of output indexes, got {output_subset!r}")
        n, subset = len(self._program.outputs), []
        for index in output_subset:
            index = check_integer(index, "output_subset", "integers")
            if not 0 <= index < n:
                raise IndexError(f"output_subset: {self.name} has {n} outputs, got index {index}")
            subset.append(index)
        return tuple(subset)

    # -- distribution ----------------------------------------------------------------------------------------

    def _ensure_distributed(self, session: Session) -> None:
        """Send the program to the workers if they have none, or the user's code in it has changed."""
        program = self._program
        if program.code is not None and program.code.has_changed():
            # The master compiles again, too: its compiled variants may hold the old code.
            program.compiled.clear()
            self._session = None
        if self._session is not session:
            _send_functions(session, [self])

    def _mark_distributed(self, session: Session) -> None:
        """Record that the workers have the program, and prepare the master's."""
        self._session = session
        self._compiled = set()
        self._program.reset_if_engine_changed()
        session.rank.objects[self._key] = weakref.ref(self._program)
        self._program.to_device()
        session.memory.release_with(self, "object", self._key)


def function(
    inputs: Sequence[Any],
    outputs: Any = None,
    bcast_inputs: Sequence[Any] | None = None,
    updates: Any = None,
    givens: Any = None,
    sliceable_shareds: Sequence[Any] | None = None,
    **kwargs: Any,
) -> Function:
    """Create a function that runs on all ranks at once, in place of ``pytensor.function`` or ``theano.function``.

    Parameters
    ----------
    inputs : list of variables
        Inputs whose rows are divided among the ranks, along axis 0.
    outputs : variable, (variable, op), or a list of these, optional
        Each output is reduced over ranks by its op: "avg" (the default: ranks have equal weights), "mean" (the weight
        of a rank is its number of rows), "sum", "prod", "min", "max", "gather" (joined along axis 0), or None (the
        master's own value).  With the prefix ``"c_"`` values on GPUs, too, are reduced in host memory.
    bcast_inputs : list of variables, optional
        Inputs that every rank gets completely.
    updates : dict, or list of (shared, expression) or (shared, expression, op), optional
        Each rank updates its own copy.  With ``num_slices`` the values of the slices are reduced by the op.
    givens : dict or list of pairs, optional
        Substitutions in the graph.
    sliceable_shareds : list of shared variables, optional
        Shared variables whose rows (along axis 0) ``batch_s`` selects and ``num_slices`` divides.
    **kwargs
        Other arguments of the graph library's ``function``: ``mode``, ``name``, ``on_unused_input``, ...

    Returns
    -------
    Function
        Each rank compiles it in the first call.

    Raises
    ------
    RuntimeError
        Before `fork`, and after `close`.
    TypeError, ValueError
        For wrong arguments, such as the op "avg" or "mean" for an integer output.

    Examples
    --------
    >>> import numpy as np, pytensor, pytensor.tensor as pt, synkhronos as synk
    >>> n = synk.fork(2, use_gpu=False)
    >>> x, w = pt.dmatrix("x"), pytensor.shared(np.ones(3), "w")
    >>> f = synk.function([x], ((x * w).sum(), "sum"), updates=[(w, w + x.sum(axis=0))])
    >>> float(f(np.ones((4, 3))))
    12.0
    >>> synk.gather(w).tolist()
    [[3.0, 3.0, 3.0], [3.0, 3.0, 3.0]]
    >>> synk.close()
    """
    session = ranks.session()
    device = session.rank.device
    program = build_program(inputs, outputs, bcast_inputs, updates, givens, sliceable_shareds, kwargs, device)
    return _make_function(program, is_single(outputs))


def _make_function(program: Program, single: bool) -> Function:
    """Return a new function, and register it for `distribute`."""
    made = Function(program, single)
    register_shareds(program.list_shareds())
    with contextlib.suppress(RuntimeError):  # a function can be unpickled while no ranks are running
        _undistributed(ranks.session())[made] = True
    return made


def _unpickle_function(nodes: Sequence[Any], program: Program, single: bool) -> Function:
    return _make_function(program, single)


def distribute() -> None:
    """Send every function, and each shared variable once, to all ranks.

    It can be called repeatedly: it sends the functions created since the last call, with their new shared variables.  A
    function that was not distributed is sent at its first call.

    Notes
    -----
    The workers' copies of a shared variable get the master's present value.  From then on each rank has its own copy.
    Random generators are moved apart, so that each rank draws different numbers.  The master draws the same numbers as
    the serial program.

    Examples
    --------
    >>> import numpy as np, pytensor, synkhronos as synk
    >>> n = synk.fork(2, use_gpu=False)
    >>> s = pytensor.shared(np.zeros(2), "s")
    >>> f = synk.function([], [], updates=[(s, s + 1)])
    >>> synk.distribute()
    >>> s.set_value(np.ones(2))  # in the master alone
    >>> synk.gather(s).tolist()
    [[1.0, 1.0], [0.0, 0.0]]
    >>> synk.close()
    """
    session = ranks.session()
    with session.turn:
        session.settle()
        _send_functions(session, list(_undistributed(session)))


class _Undistributed(WeakKeys[Function, bool]):
    """Functions created since the fork that were not sent to the workers; earlier ones are sent when called."""


def _undistributed(session: Session) -> _Undistributed:
    return session.registry.get(_Undistributed)


def _send_functions(session: Session, functions: Sequence[Function]) -> None:
    functions = sorted((f for f in functions if f._session is not session), key=lambda f: f._key)
    if not functions:
        return
    by_library: dict[str, list[Function]] = {}
    for f in functions:
        by_library.setdefault(f._program.library.name, []).append(f)
    for group in by_library.values():
        variables = [variable for f in group for variable in f._program.list_variables()]
        try:
            Mirror.get(session).send([(f._key, f._program) for f in group], variables)
        except TypeError as error:
            # The error of the pickle does not tell whether the graph or a keyword argument caused it.
            for f in group:
                try:
                    f._program.check_picklable()
                except TypeError as found:
                    raise TypeError(f"{f.name}: {found}") from found.__cause__
            raise TypeError(f"{', '.join(f.name for f in group)}: {error}") from error
    for f in functions:
        f._mark_distributed(session)
        _undistributed(session).discard(f)
