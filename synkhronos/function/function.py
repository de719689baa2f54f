"""Functions that run on all ranks.

`Function`
    What the user calls.
`function`
    Makes one.
`distribute`
    Copies functions and shared variables to all ranks.
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
from synkhronos.checks import at_least, integer
from synkhronos.data import Data, data
from synkhronos.devices import JAX
from synkhronos.function.build import build, is_single
from synkhronos.function.call import Call
from synkhronos.function.inputs import Inputs, all_slices
from synkhronos.function.program import PLAIN, Program, Variant
from synkhronos.graphs.mirror import Mirror, declare
from synkhronos.ranks import Session, WeakKeys

_keys = itertools.count()


class Function:
    """A function that runs on all ranks at once.

    Made by `synkhronos.function`; calling it is described in `__call__`.
    """

    def __init__(self, program: Program, single: bool):
        self._program = program
        self._single = single
        self._key = ("function", next(_keys))
        self._session: Session | None = None
        self._ready: set[Variant] = set()
        self._inputs = Inputs(program)

    # -- what it is ------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """What the function is called."""
        return self._program.name

    @property
    def output_modes(self) -> list[str | None]:
        """The op of each output."""
        return [op.spelled for op in self._program.output_ops]

    @property
    def update_modes(self) -> list[str | None]:
        """The op of each update: how slices accumulate."""
        return [op.spelled for op in self._program.update_ops]

    def __repr__(self) -> str:
        names = ", ".join(entry.name or "_" for entry in self._program.inputs)
        return f"<synkhronos.Function {self.name}({names}) -> {self.output_modes}>"

    def get_shared(self) -> list[Any]:
        """Return the shared variables that the function reads or updates."""
        return self._program.shareds()

    # -- copying it ------------------------------------------------------------------------------------------
    #
    # As the graph libraries' own functions: a copy has the same shared variables, a deep copy or a pickle has copies of
    # them, with the values that they have in the master.

    def __copy__(self) -> Function:
        return _made(copy.copy(self._program), self._single)

    def __reduce__(self) -> Any:
        # Every node comes after those it depends on: pickle follows references, and would go as deep as the graph.
        program = self._program
        return _unpickled, (program.library.nodes(program.variables()), program, self._single)

    def __deepcopy__(self, memo: dict[int, Any]) -> Function:
        program = self._program
        make, arguments = self.__reduce__()
        for shared in self.get_shared():  # PyTensor's containers can't copy JAX arrays, but pickle them
            if JAX.holds(program.library.get(shared)) and id(shared.container) not in memo:
                memo[id(shared.container)] = pickle.loads(pickle.dumps(shared.container))
        made: Function = make(*copy.deepcopy(arguments, memo))
        return made

    # -- running it ------------------------------------------------------------------------------------------

    def __call__(
        self,
        *inputs: Any,
        batch: Any = None,
        batch_s: Any = None,
        num_slices: int = 1,
        output_subset: Sequence[int] | None = None,
        **named_inputs: Any,
    ) -> Any:
        """Run on all ranks, and return the reduced outputs.

        Parameters
        ----------
        *inputs : Data or array_like
            In the order of ``inputs`` and then ``bcast_inputs``.  Arrays other than Data are copied into shared memory
            that the library keeps for the purpose.
        batch : int, slice, list of int, or array of int or bool, optional
            Which rows of the scattered inputs to use: an int for so many from the first, a slice, indexes, or a mask.
            Rows are picked before they are split among the ranks.
        batch_s : slice or list of int, or a list of these with one for each rank, optional
            Which rows of its own ``sliceable_shareds`` each rank uses.
        num_slices : int
            The number of pieces in which each rank computes its rows; more pieces take less memory.
        output_subset : sequence of int, optional
            Which outputs to compute and return.
        **named_inputs
            Inputs by the names of their variables.

        Returns
        -------
        ndarray, or list of ndarray
            A list if ``outputs`` was one.  In JAX mode `Result` objects, which stand for arrays and are read when they
            are looked at: the call itself returns before the ranks have computed.

        Raises
        ------
        TypeError, ValueError, IndexError
            For wrong arguments, before any rank starts.
        WorkerError
            If a worker raised an exception, or died.

        Notes
        -----
        The rows are split into as many runs as there are ranks, as evenly as possible, in rank order.  A rank without
        rows sits out: it updates nothing, and counts in no op.

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
            call = self.prepare(session, inputs, named_inputs, batch, batch_s, num_slices, output_subset)
            return self.results(session, call, session.run(call))

    def read(self, *inputs: Any, num_slices: int = 1) -> Any:
        """Do as a call whose outputs are read at once: in JAX mode in one command, for arrays in place of `Result`."""
        session = ranks.session()
        with session.turn:
            session.settle()
            call = self.prepare(session, inputs, {}, None, None, num_slices, None)._replace(read_at_once=True)
            return self.results(session, call, session.run(call))

    def run(self, session: Session) -> Any:
        """Do as a call without arguments, in the turn of another call."""
        call = self.prepare(session, (), {}, None, None, 1, None)
        return self.results(session, call, session.run(call))

    def prepare(
        self,
        session: Session,
        inputs: Sequence[Any],
        named_inputs: dict[str, Any],
        batch: Any,
        batch_s: Any,
        num_slices: int,
        output_subset: Sequence[int] | None,
    ) -> Call:
        """Check a call's arguments and put the inputs where the ranks find them; return the command to run.

        For those who run it together with others; the session's turn has to be held until `results` has been called.
        """
        variant = self._variant(batch_s, num_slices, output_subset)
        arrays, count = self._inputs.locate(session, inputs, named_inputs, batch)
        chosen = None if batch_s is None else self._inputs.choose(session, batch_s)
        has_updates = bool(self._program.updates)
        try:
            self._distribute(session)
            self._program.engine.before_call(session)
        except Exception as error:
            if has_updates:  # the user may ask, as of a call that failed later
                error.add_note("The function's updates were applied on no rank.")
            raise
        return Call(self._key, variant, variant not in self._ready, arrays, count, chosen, num_slices, has_updates)

    def most_at_once(self, combined: np.dtype) -> int:
        """Return how many times one launch can compute, and combine the ranks' arrays of a dtype each time."""
        return self._program.engine.most_at_once(combined)

    def outputs(self, session: Session, call: Call, collected: Any) -> list[Any]:
        """Return each output, as often as it was computed, from what the command of `prepare` has returned."""
        self._ready.add(call.variant)
        results = collected if call.read_at_once or not collected else self._program.engine.results(session, collected)
        return [np.asarray(result) if isinstance(result, np.generic) else result for result in results]

    def results(self, session: Session, call: Call, collected: Any) -> Any:
        """Return what the user gets, from what the command of `prepare` has returned."""
        results = self.outputs(session, call, collected)
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
        """Make Data objects for the function's inputs.

        Parameters
        ----------
        *args : array_like
            A value for each input, in order.
        force_cast, oversize
            As in `synkhronos.data`.
        minibatch : bool or sequence of bool
            For all inputs, or one for each.
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
        values = self._inputs.values(args, named)
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

    # -- preparing a call ------------------------------------------------------------------------------------

    def _variant(self, batch_s: Any, num_slices: Any, output_subset: Any) -> Variant:
        if batch_s is None and output_subset is None and type(num_slices) is int and num_slices == 1:
            return PLAIN
        program = self._program
        num_slices = at_least(num_slices, "num_slices", 1)
        if num_slices > 1:
            if not program.n_scattered and not program.sliceable:
                raise ValueError(
                    f"num_slices={num_slices}: {self.name} has no scattered inputs and no sliceable_shareds to cut"
                )
            for shared, op in program.accumulated():
                if not program.library.is_array(shared):
                    if op.name is not None:
                        raise TypeError(
                            f"num_slices={num_slices}: the update of {shared.name!r} of type {shared.type} can't be "
                            "accumulated; give it the op None, by which the last slice's stays"
                        )
                elif op.name is not None and not op.row.suits(np.dtype(shared.type.dtype)):
                    raise ValueError(
                        f"num_slices={num_slices}: op {op.spelled!r} of the update of {shared.name!r} would not be "
                        f"{shared.type.dtype}, as it is; give the update another op"
                    )
        rows = None
        if batch_s is not None and not program.sliceable:
            raise ValueError(f"batch_s: {self.name} was made without sliceable_shareds")
        if program.sliceable and (batch_s is not None or num_slices > 1):
            for shared in program.sliceable:
                if any(shared is updated for updated, _ in program.updates + program.default_updates):
                    raise ValueError(
                        f"{'num_slices' if batch_s is None else 'batch_s'}: {shared.name!r} is one of the "
                        f"sliceable_shareds and {self.name} updates it: of the rows that are chosen, the update would "
                        "make the whole variable; update another variable, or leave this one out of sliceable_shareds"
                    )
            spans = batch_s is None or all_slices(batch_s)
            rows = "slice" if spans and not program.engine.fixed_lengths else "index"
        return Variant(rows, bool(num_slices > 1), self._subset(output_subset))

    def _subset(self, output_subset: Any) -> tuple[int, ...] | None:
        if output_subset is None:
            return None
        if not isinstance(output_subset, list | tuple | np.ndarray | range):
            raise TypeError(f"output_subset: expected a list of output indexes, got {output_subset!r}")
        n, subset = len(self._program.outputs), []
        for index in output_subset:
            index = integer(index, "output_subset", "integers")
            if not 0 <= index < n:
                raise IndexError(f"output_subset: {self.name} has {n} outputs, got index {index}")
            subset.append(index)
        return tuple(subset)

    # -- distributing ----------------------------------------------------------------------------------------

    def _distribute(self, session: Session) -> None:
        program = self._program
        if program.code is not None and program.code.has_changed():
            # All ranks compile it anew: what is compiled may hold the old code, on the master too.
            program.compiled.clear()
            self._session = None
        if self._session is not session:
            _distribute(session, [self])

    def _entered(self, session: Session) -> None:
        """Note that the workers have it."""
        self._session = session
        self._ready = set()
        self._program.place()
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
    """Make a function that runs on all ranks at once.

    This takes the place of ``pytensor.function`` and ``theano.function``, to which other keyword arguments are passed.

    Parameters
    ----------
    inputs : list of variables
        Scattered along axis 0.
    outputs : variable, (variable, op), or a list of these, optional
        Each is reduced over ranks by its op: "avg" (the default: ranks weigh the same), "mean" (each weighs as many
        rows as it computed), "sum", "prod", "min", "max", "gather" (joined along axis 0), or None (the master's own).
        With ``"c_"`` in front the reduction happens in host memory even for values on GPUs.
    bcast_inputs : list of variables, optional
        Passed whole to every rank.
    updates : dict, or list of (shared, expression) or (shared, expression, op), optional
        Each rank updates its own copy.  The op says how ``num_slices`` accumulates.
    givens : dict or list of pairs, optional
        Substitutions in the graph.
    sliceable_shareds : list of shared variables, optional
        Those of which ``batch_s`` and ``num_slices`` pick rows, along axis 0.
    **kwargs
        For the graph library's own ``function``: ``mode``, ``name``, ``on_unused_input``, ...

    Returns
    -------
    Function
        Compiled in each rank when it is first called.

    Raises
    ------
    RuntimeError
        Before `fork`, and after `close`.
    TypeError, ValueError
        For wrong arguments; among these "avg" or "mean" of an integer output.

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
    program = build(inputs, outputs, bcast_inputs, updates, givens, sliceable_shareds, kwargs, device)
    return _made(program, is_single(outputs))


def _made(program: Program, single: bool) -> Function:
    """Return a function, and note that the workers don't have it."""
    made = Function(program, single)
    declare(program.shareds())
    with contextlib.suppress(RuntimeError):  # no ranks are running, which one that is unpickled can wait for
        _undistributed(ranks.session())[made] = True
    return made


def _unpickled(nodes: Sequence[Any], program: Program, single: bool) -> Function:
    return _made(program, single)


def distribute() -> None:
    """Send every function, and each shared variable once, to all ranks.

    Call it as often as you like: it sends the functions made since the last time, with the shared variables that are
    new. A function that was not distributed is sent at its first call.

    Notes
    -----
    Shared variables get the values that they have in the master now.  From then on each rank's copy is its own. Random
    generators are moved apart, so that each rank draws different numbers; the master draws those that the serial
    program would draw.
    """
    session = ranks.session()
    with session.turn:
        session.settle()
        _distribute(session, list(_undistributed(session)))


class _Undistributed(WeakKeys[Function, bool]):
    """The functions made since the fork that the workers don't have; earlier ones are sent when called."""


def _undistributed(session: Session) -> _Undistributed:
    return session.registry.get(_Undistributed)


def _distribute(session: Session, functions: Sequence[Function]) -> None:
    functions = sorted((f for f in functions if f._session is not session), key=lambda f: f._key)
    if not functions:
        return
    by_library: dict[str, list[Function]] = {}
    for f in functions:
        by_library.setdefault(f._program.library.name, []).append(f)
    for group in by_library.values():
        variables = [variable for f in group for variable in f._program.variables()]
        try:
            Mirror.of(session).send([(f._key, f._program) for f in group], variables)
        except TypeError as error:
            # The pickle can't tell a graph from what came with it.
            for f in group:
                try:
                    f._program.check_kwargs()
                except TypeError as found:
                    raise TypeError(f"{f.name}: {found}") from found.__cause__
            raise TypeError(f"{', '.join(f.name for f in group)}: {error}") from error
    for f in functions:
        f._entered(session)
        _undistributed(session).discard(f)
