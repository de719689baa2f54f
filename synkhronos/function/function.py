"""Functions that run on all ranks.

`Function`
    What the user calls.
`function`
    Makes one.
`distribute`
    Copies functions and shared variables to all ranks.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from synkhronos import ranks
from synkhronos.data import Data, data
from synkhronos.data.rows import Selection, highest, lowest, select, take
from synkhronos.function.build import build, is_single
from synkhronos.function.call import Call, Scattered, Whole
from synkhronos.function.program import Program, Variant
from synkhronos.graphs.mirror import Mirror
from synkhronos.ranks import Session, SharedArray

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
        self._kept: dict[Any, Data] = {}
        self._by_name = {e.name: i for i, e in enumerate(program.inputs) if e.name is not None}

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
        """Run on all ranks, and return the outputs' reductions.

        Parameters
        ----------
        *inputs : Data or array_like
            In the order of ``inputs`` and then ``bcast_inputs``.  Arrays other than Data are copied into shared memory
            that the library keeps for the purpose.
        batch : int, slice, list of int, or array of int or bool, optional
            Which rows of the scattered inputs to use, before they are shared out: the first that many, a slice,
            indexes, or a mask.
        batch_s : slice or list of int, or a list of these, one a rank, optional
            Which rows of its own ``sliceable_shareds`` each rank uses.
        num_slices : int
            In how many pieces each rank computes its rows, to save memory.
        output_subset : sequence of int, optional
            Which outputs to compute and return.
        **named_inputs
            Inputs by the names of their variables.

        Returns
        -------
        ndarray, or list of ndarray
            A list if ``outputs`` was one.

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
        with ranks.turn() as session:
            variant = self._variant(batch_s, num_slices, output_subset)
            arrays, count = self._locate(session, inputs, named_inputs, batch)
            chosen = self._chosen(session, batch_s)
            self._distribute(session)
            has_updates = bool(self._program.updates)
            call = Call(self._key, variant, variant not in self._ready, arrays, count, chosen, num_slices, has_updates)
            results = session.run(call)
            self._ready.add(variant)
        if self._single:
            return _presentable(results[0]) if results else []
        return [_presentable(result) for result in results]

    def as_theano(self, *args: Any, **kwargs: Any) -> Any:
        """Run as the plain library would, in the master alone, on all rows.

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
        result = self._program.function(Variant())(*plain, **named)
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
        values = self._values(args, named)
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
        program = self._program
        if isinstance(num_slices, bool) or not isinstance(num_slices, int | np.integer):
            raise TypeError(f"num_slices: expected an integer, got {num_slices!r}")
        if num_slices < 1:
            raise ValueError(f"num_slices: expected at least 1, got {num_slices}")
        if num_slices > 1:
            if not program.n_scattered and not program.sliceable:
                raise ValueError(
                    f"num_slices={num_slices}: {self.name} has no scattered inputs and no sliceable_shareds to cut"
                )
            for shared, op in program.accumulated():
                if op.divides and np.dtype(shared.type.dtype).kind in "biu":
                    raise ValueError(
                        f"num_slices={num_slices}: op {op.spelled!r} of the update of {shared.name!r} would not be "
                        f"{shared.type.dtype}, as it is; give the update another op"
                    )
        rows = None
        if batch_s is not None and not program.sliceable:
            raise ValueError(f"batch_s: {self.name} was made without sliceable_shareds")
        if program.sliceable and (batch_s is not None or num_slices > 1):
            spans = batch_s is None or _all_slices(batch_s)
            rows = "slice" if spans and not program.asynchronous else "index"
        return Variant(rows, bool(num_slices > 1), self._subset(output_subset))

    def _subset(self, output_subset: Any) -> tuple[int, ...] | None:
        if output_subset is None:
            return None
        if not isinstance(output_subset, list | tuple | np.ndarray | range):
            raise TypeError(f"output_subset: expected a list of output indexes, got {output_subset!r}")
        n, subset = len(self._program.outputs), []
        for index in output_subset:
            if isinstance(index, bool) or not isinstance(index, int | np.integer):
                raise TypeError(f"output_subset: expected integers, got {index!r}")
            if not 0 <= index < n:
                raise IndexError(f"output_subset: {self.name} has {n} outputs, got index {index}")
            subset.append(int(index))
        return tuple(subset)

    def _values(self, args: Sequence[Any], named: dict[str, Any]) -> list[Any]:
        """Put positional and named arguments, and defaults, in the inputs' order."""
        entries = self._program.inputs
        if len(args) > len(entries):
            raise TypeError(f"{self.name} takes {len(entries)} inputs, got {len(args)}")
        values: list[Any] = [*args, *[_MISSING] * (len(entries) - len(args))]
        for name, value in named.items():
            position = self._by_name.get(name)
            if position is None:
                raise TypeError(f"{self.name} has no input {name!r}; its inputs are {list(self._by_name)}")
            if values[position] is not _MISSING:
                raise TypeError(f"{self.name}: input {name!r} was given twice")
            values[position] = value
        for i, entry in enumerate(entries):
            if values[i] is _MISSING:
                if not entry.default:
                    raise TypeError(f"{self.name}: missing input {i} ({entry.name or entry.variable})")
                values[i] = entry.default[0]
        return values

    def _locate(
        self, session: Session, args: Sequence[Any], named: dict[str, Any], batch: Any
    ) -> tuple[tuple[Scattered | Whole, ...], int | None]:
        """Check the inputs, put arrays into shared memory, and say where each rank finds its rows."""
        program, n = self._program, self._program.n_scattered
        values = self._values(args, named)
        checked = [self._checked(i, value, session) for i, value in enumerate(values)]
        if n == 0:
            if batch is not None:
                raise ValueError(f"batch: {self.name} has no scattered inputs")
            return tuple(self._whole(i, value) for i, value in enumerate(checked)), None

        rows, low = self._select(checked[:n], batch)
        located: list[Scattered | Whole] = []
        index: SharedArray | None = None
        for i, value in enumerate(checked):
            copy = program.inputs[i].mutable
            if i >= n:
                located.append(self._whole(i, value))
            elif not isinstance(value, Data):
                # The master picks the rows while it copies: nothing is moved that isn't asked for.
                kept = self._keep(i, value.dtype, value.ndim)
                take(value, rows, kept.resized((len(rows), *value.shape[1:])))
                located.append(Scattered(kept.where(), range(len(rows)), 0, copy))
            else:
                if index is None and not isinstance(rows, range):
                    index = self._shared_index("batch", rows)
                where: range | SharedArray = rows if isinstance(rows, range) else index  # type: ignore[assignment]
                located.append(Scattered(value.where(), where, low if value.minibatch else 0, copy))
        return tuple(located), len(rows)

    def _checked(self, position: int, value: Any, session: Session) -> Data | np.ndarray:
        entry = self._program.inputs[position]
        called = f"input {position} ({entry.name or entry.variable}) of {self.name}"
        if isinstance(value, Data):
            value.check_session(session, called)
            if value.dtype != entry.variable.type.dtype or value.ndim != entry.variable.type.ndim:
                raise TypeError(
                    f"{called}: expected {entry.variable.type.dtype} of {entry.variable.type.ndim} dimensions, "
                    f"got Data of {value.dtype} and {value.ndim} dimensions"
                )
            checked: Data | np.ndarray = value
        else:
            try:
                checked = self._program.library.filter(entry, value)
            except (TypeError, ValueError, AttributeError) as error:
                wrong = ValueError if isinstance(error, ValueError) else TypeError
                raise wrong(f"{called}: expected {entry.variable.type}, got {_short(value)}: {error}") from None
        fixed = self._program.library.fixed_shape(entry.variable)
        if any(f is not None and f != s for f, s in zip(fixed, checked.shape, strict=True)):
            raise ValueError(f"{called}: expected shape {fixed} (None is any length), got {checked.shape}")
        return checked

    def _select(self, values: Sequence[Data | np.ndarray], batch: Any) -> tuple[Selection, int]:
        """Return the selected rows of all ranks together, and the lowest index among them."""
        lengths = [len(v) for v in values if not (isinstance(v, Data) and v.minibatch)]
        if not lengths and batch is None:
            lengths = [len(v) for v in values]  # all are minibatches, and the batch is what they hold
        if not lengths:
            rows = _select_freely(batch)
        else:
            rows = select(batch, min(lengths))
            # What counts from the end picks other rows where there are more of them.
            if any(not np.array_equal(select(batch, length), rows) for length in set(lengths) - {min(lengths)}):
                raise ValueError(
                    f"{self.name}: scattered inputs need equally many rows, got {lengths}"
                    + ("" if batch is None else f", of which batch={_short(batch)} picks different ones")
                )
        low = lowest(rows) if any(isinstance(v, Data) and v.minibatch for v in values) else 0
        for i, value in enumerate(values):
            if isinstance(value, Data) and value.minibatch and highest(rows) - low >= len(value):
                raise IndexError(
                    f"batch: input {i} is a minibatch of {len(value)} rows, but batch spans {highest(rows) - low + 1}"
                )
        return rows, low

    def _whole(self, position: int, value: Data | np.ndarray) -> Whole:
        if not isinstance(value, Data):
            kept = self._keep(position, value.dtype, value.ndim)
            kept.resized(value.shape)[...] = value
            value = kept
        return Whole(value.where(), self._program.inputs[position].mutable)

    def _keep(self, key: Any, dtype: np.dtype, ndim: int) -> Data:
        """Return the shared memory that is kept for an input."""
        kept = self._kept.get(key)
        session = ranks.session()
        if kept is None or kept.dtype != dtype or not kept.belongs_to(session):
            kept = self._kept[key] = Data(dtype, ndim)
        return kept

    def _shared_index(self, key: Any, index: np.ndarray) -> SharedArray:
        kept = self._keep(key, np.dtype(np.int64), 1)
        kept.resized(index.shape)[...] = index
        return kept.where()

    def _chosen(self, session: Session, batch_s: Any) -> tuple[Any, ...] | None:
        """Check ``batch_s`` as far as the master can, and return each rank's."""
        if batch_s is None:
            return None
        each = _one_a_rank(batch_s, session.size)
        chosen: list[Any] = []
        for r, one in enumerate([batch_s] if each is None else each):
            if isinstance(one, slice):
                select(one, 0, "batch_s")  # complains of bounds that are no integers
                chosen.append(one)
            else:
                chosen.append(self._shared_index(("batch_s", r), _index_list(one, "batch_s")))
        return tuple(chosen * session.size if each is None else chosen)

    # -- distributing ----------------------------------------------------------------------------------------

    def _needs_distribution(self, session: Session) -> bool:
        return self._session is not session

    def _distribute(self, session: Session) -> None:
        if self._needs_distribution(session):
            _distribute(session, [self])

    def _entered(self, session: Session) -> None:
        """Note that the workers have it."""
        self._session = session
        self._ready = set()
        session.rank.store[self._key] = weakref.ref(self._program)
        reference = weakref.ref(session)
        weakref.finalize(self, _release, reference, self._key)


_MISSING = object()


def _release(session: weakref.ref[Session], key: Any) -> None:
    alive = session()
    if alive is not None:
        alive.release_stored(key)


def _presentable(result: Any) -> Any:
    return np.asarray(result) if isinstance(result, np.generic) else result


def _short(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype} and shape {value.shape}"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _all_slices(batch_s: Any) -> bool:
    """Whether every rank's choice is a run of rows."""
    candidates = batch_s if isinstance(batch_s, list | tuple) else [batch_s]
    return all(isinstance(one, slice) and one.step in (None, 1) for one in candidates) and len(candidates) > 0


def _one_a_rank(batch_s: Any, size: int) -> list[Any] | None:
    """Return a list of choices if ``batch_s`` is one, None if it is one choice for all ranks."""
    if isinstance(batch_s, slice):
        return None
    if isinstance(batch_s, list | tuple) and any(
        isinstance(one, slice | list | tuple | range) or isinstance(one, np.ndarray) and one.ndim for one in batch_s
    ):
        if len(batch_s) != size:
            raise ValueError(f"batch_s: expected one choice of rows for each of {size} ranks, got {len(batch_s)}")
        return list(batch_s)
    if isinstance(batch_s, np.ndarray) and batch_s.ndim == 2:
        return _one_a_rank(list(batch_s), size)
    return None


def _index_list(one: Any, name: str) -> np.ndarray:
    """Check a list of indexes whose range only the rank knows."""
    if isinstance(one, int | np.integer | str | bytes | dict | set) or not hasattr(one, "__len__"):
        raise TypeError(f"{name}: expected a slice, a list of indexes, or a list of these, one a rank, got {one!r}")
    try:
        index = np.asarray(one)
    except ValueError as error:
        raise TypeError(f"{name}: expected a flat list of indexes, got {one!r}") from error
    if index.ndim != 1:
        raise ValueError(f"{name}: expected indexes in one dimension, got an array of shape {index.shape}")
    if index.size == 0:
        return np.empty(0, np.int64)
    if index.dtype.kind not in "iu":
        raise TypeError(f"{name}: expected integer indexes, got dtype {index.dtype}")
    return index.astype(np.int64, copy=False)


def _select_freely(batch: Any) -> Selection:
    """Return the rows of a batch where every input is a minibatch, so that nothing bounds it."""
    if isinstance(batch, slice):
        select(batch, 0)  # complains of bounds that are no integers
        far = batch.start if (batch.step or 1) < 0 else batch.stop
        if far is None or min(far, batch.start or 0, batch.stop or 0) < 0:
            raise ValueError(f"batch: with minibatch inputs alone a slice needs bounds from the start, got {batch!r}")
        return select(batch, far + 1)
    if isinstance(batch, int | np.integer) and not isinstance(batch, bool):
        return select(batch, max(0, int(batch)))
    if (
        isinstance(batch, np.ndarray)
        and batch.dtype == bool
        or isinstance(batch, list)
        and batch
        and isinstance(batch[0], bool)
    ):
        return select(batch, len(batch))
    endless = np.iinfo(np.int64).max
    rows = select(batch, endless)
    if highest(rows) > endless // 2:
        raise IndexError(f"batch: with minibatch inputs alone indexes need to be from the start, got {_short(batch)}")
    return rows


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

    As ``pytensor.function`` and ``theano.function``, whose other keyword arguments pass through.

    Parameters
    ----------
    inputs : list of variables
        Scattered along axis 0.
    outputs : variable, (variable, op), or a list of these, optional
        Each is reduced over ranks by its op: "avg" (the default: ranks weigh the same), "mean" (each weighs as many
        rows as it computed), "sum", "prod", "min", "max", "gather" (joined along axis 0), or None (the master's own).
        With ``"c_"`` in front the reduction happens in host memory.
    bcast_inputs : list of variables, optional
        Passed whole to every rank.
    updates : dict, or list of (shared, expression) or (shared, expression, op), optional
        Each rank updates its own copy.  The op says how ``num_slices`` accumulates.
    givens : dict or list of pairs, optional
        Substitutions in the graph.
    sliceable_shareds : list of shared variables, optional
        Those that ``batch_s`` and ``num_slices`` cut along axis 0.
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
    program = build(inputs, outputs, bcast_inputs, updates, givens, sliceable_shareds, kwargs)
    made = Function(program, is_single(outputs))
    _undistributed(session).add(made)
    Mirror.of(session).declare(program.shareds())
    return made


def distribute() -> None:
    """Copy every function, and each shared variable once, to all ranks.

    May be called any number of times: functions made since the last time are copied, and the shared variables that are
    new with them.  The first call of a function that was not distributed does it by itself.

    Notes
    -----
    Shared variables get the values that they have in the master now.  From then on each rank's copy is its own.
    Random generators are moved apart, so that each rank draws different numbers; the master's draws what it would in
    the serial program.
    """
    with ranks.turn() as session:
        _distribute(session, list(_undistributed(session)))


def _undistributed(session: Session) -> weakref.WeakSet[Function]:
    return session.rank.store.setdefault("undistributed", weakref.WeakSet())


def _distribute(session: Session, functions: Sequence[Function]) -> None:
    functions = sorted((f for f in functions if f._needs_distribution(session)), key=lambda f: f._key)
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
            raise TypeError(f"{', '.join(f.name for f in group)}: {error}") from error
    for f in functions:
        f._entered(session)
        _undistributed(session).discard(f)
