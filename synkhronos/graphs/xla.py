"""How functions run that XLA compiles.

`Executable`
    PyTensor functions in JAX mode, called on device arrays: it returns before it has computed.
`Combination`
    What may stand between two of them that are launched as one.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, islice, repeat, starmap
from operator import setitem
from typing import Any, NamedTuple

import numpy as np

from synkhronos.devices import Device
from synkhronos.devices.jax.foreign import all_reduced, started
from synkhronos.devices.jax.log import LAUNCHES, Log
from synkhronos.graphs.family import is_held
from synkhronos.graphs.precision import COMPILER_OPTIONS, bfloat16
from synkhronos.graphs.traced import Traced
from synkhronos.ranks.interrupts import undisturbed

#: Combined launches that a function keeps: those that were used last.
_FOLLOWED = 16


#: Bytes of a vector, at least, that are combined at once: what is computed later comes beside that.
_PIECE = 25_000_000


class Exchange(NamedTuple):
    """How a vector is combined.

    Attributes
    ----------
    dtype : str or None
        In which it travels, all but its last item; None for its own.
    sizes : tuple of int
        Lengths of its parts, as they are computed one after another, the last of them first; it is cut between these
        alone.  Empty if it is not to be cut.
    """

    dtype: str | None = None
    sizes: tuple[int, ...] = ()


class Combination(NamedTuple):
    """The ranks' values of a variable are combined; if that turns out not to count, no other variable is updated.

    Attributes
    ----------
    storage : list of one array
        The variable's container.
    exchange : Exchange
    n_ranks : int
        By how many to divide what travels in another dtype; what travels in its own isn't divided here.
    """

    storage: list[Any]
    exchange: Exchange = Exchange()
    n_ranks: int = 1


class Executable:
    """PyTensor functions in JAX mode, called on device arrays; usually one.

    PyTensor's own call takes NumPy inputs and leaves shared variables where they were, so that NumPy values would cross
    to the device at each call.  This one calls the same compiled graphs, with what the containers hold; values that the
    user put there as NumPy arrays are moved to the device first, and stay there.

    Memory of a shared variable that is updated is donated: XLA writes the new value into it.  An array that somebody
    holds beside the container (``get_value(borrow=True)``) is copied before, or it would vanish under its holder.

    Parameters
    ----------
    pieces : list of Traced and Combination
        What is computed, in this order, in one launch.
    device : Device
        Where arrays live.
    log : bool
        Whether to return outputs that are numbers as a log's entries.
    times : int
        How many times all of it is done in a launch, each time with the next rows: every input is cut into so many
        equal parts along axis 0, and every output, which have to be numbers in the log, is returned so many times.
    """

    def __init__(self, pieces: Sequence[Traced | Combination], device: Device, log: bool = False, times: int = 1):
        import jax
        import jax.numpy as jnp

        # PyTensor's dispatchers, imported when the first function is compiled, turn this off where floatX is float32.
        # Whatever turned it on again after the first call would have that function compiled twice.
        jax.config.update("jax_enable_x64", True)
        self._device = device
        self._pieces = list(pieces)
        self._logs_numbers, self._times = log, times
        traced = [piece for piece in pieces if isinstance(piece, Traced)]
        self._followed: dict[Any, Executable] = {}
        self._n_inputs = sum(piece.n_inputs for piece in traced)
        self._storages = _each_once([storage for piece in traced for storage in piece.storages])
        of_storages = {id(storage) for storage in self._storages}
        #: Where the results of a launch go: first what is returned, then the containers' new values.
        self._outputs = [cell for piece in traced for cell in piece.cells[: piece.n_outputs]]
        self._updated = _each_once([cell for piece in traced for cell in piece.cells if id(cell) in of_storages])
        self._donated = _each_once([storage for piece in traced for storage in piece.donated])
        self._copy = jnp.copy
        self._log: Log | None = None
        self._is_interrupted = False
        #: Which inputs' values are looked at, as lengths follow from them.
        self.inputs_on_host = frozenset(
            position for piece in traced[:1] if piece.steered is not None for position in piece.steered.positions
        )
        self._is_steered = any(piece.steered is not None for piece in traced)
        assert len(traced) == 1 or not self._is_steered
        types = [kind for piece in traced for kind in piece.types]
        self._logged = [i for i, kind in enumerate(types) if log and getattr(kind, "ndim", None) == 0]
        self._dtypes = [np.dtype(types[i].dtype) for i in self._logged]
        self._outputs = [cell for i, cell in enumerate(self._outputs) if i not in self._logged]
        if self._logged or times > 1:
            self._log = Log(self._dtypes)
        # A variable whose new value has another shape can't be written into the old memory, which is no mistake.
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        donated = {id(storage) for storage in self._donated}
        positions = [self._n_inputs + i for i, storage in enumerate(self._storages) if id(storage) in donated]
        if self._log is not None:
            n_arguments = self._n_inputs + len(self._storages)
            positions += range(n_arguments, n_arguments + len(self._log.cells))
        # Old values that nothing is computed from are kept as arguments: the new ones then take their place, and
        # addresses stay the same from launch to launch, as the launches that XLA records need them.
        options = COMPILER_OPTIONS if bfloat16() else None
        # Without a reference to this, or only the garbage collector would free what it holds.
        run = partial(_compute, self._pieces, self._storages, self._updated, self._logged)
        if times > 1:
            if self._outputs:
                raise ValueError("what is done many times in a launch can return numbers alone")
            at = {id(storage): i for i, storage in enumerate(self._storages)}
            logs = range(len(at), len(at) + 1 + len(self._logged))
            changed = [*(at[id(cell)] for cell in self._updated), *logs]
            run = partial(_repeated, partial(run, in_loop=True), times, self._n_inputs, changed)
        if self._is_steered:
            # The lengths come first, and are constants to XLA, which compiles anew for others.
            run, positions = partial(_of_lengths, run), [position + 1 for position in positions]
            self._run = jax.jit(
                run, static_argnums=0, donate_argnums=tuple(positions), keep_unused=True, compiler_options=options
            )
        else:
            self._run = jax.jit(run, donate_argnums=tuple(positions), keep_unused=True, compiler_options=options)

    def followed_by(self, other: Executable, combined: Combination | None, times: int = 1) -> Executable | None:
        """Return what does in one launch what this one does and then another one.

        Parameters
        ----------
        other : Executable
        combined : Combination or None
            What happens in between.
        times : int
            How many times, one after the other, with parts of the inputs.

        Returns
        -------
        Executable, or None
            The same one each time; None where there can't be one.
        """
        key = other, None if combined is None else (id(combined.storage), *combined[1:]), times
        followed = self._followed.pop(key, None)
        if followed is None:
            between = [] if combined is None else [combined]
            pieces = [*self._pieces, *between, *other._pieces]
            known = combined is None or any(combined.storage is cell for cell in self._updated)
            if not known or self._is_steered or other._is_steered:
                return None
            while len(self._followed) >= _FOLLOWED:
                del self._followed[next(iter(self._followed))]
            followed = Executable(pieces, self._device, self._logs_numbers, times)
        self._followed[key] = followed  # behind all others
        return followed

    def repeated(self, times: int) -> Executable | None:
        """Return what does in one launch many times what this one does, each time with the next part of the inputs.

        The same one each time; None where outputs are no numbers, or inputs decide shapes.
        """
        if times == 1:
            return self
        key = None, 0, times
        repeated = self._followed.pop(key, None)
        if repeated is None:
            if self.inputs_on_host or self._outputs or times > LAUNCHES:
                return None
            while len(self._followed) >= _FOLLOWED:
                del self._followed[next(iter(self._followed))]
            repeated = Executable(self._pieces, self._device, self._logs_numbers, times)
        self._followed[key] = repeated
        return repeated

    def __call__(self, *inputs: Any) -> list[Any]:
        """Start the computation, and return its outputs: arrays that will be there when they are read."""
        for storage in self._storages:
            if type(storage[0]) is np.ndarray:
                storage[0] = self._device.from_host(storage[0])
        for storage in self._donated:
            if is_held(storage):
                with undisturbed():  # as a log's beginning
                    storage[0] = self._copy(storage[0])
        if self._log is not None and (self._is_interrupted or not self._log.has_room(self._times)):
            self._log = Log(self._dtypes)
        arguments = self._arguments(inputs)
        self._device.launching()
        # Until it is over nobody knows whether this launch has written into the log, and whether that is noted there.
        self._is_interrupted = True
        try:
            self._launch(arguments)
        finally:
            del arguments  # which an error's traceback would hold
        results = self._results()
        self._is_interrupted = False
        return results

    def _results(self) -> list[Any]:
        """Return the outputs of what has just been launched."""
        if self._n_inputs:
            self._device.launched([cell[0] for cell in (*self._outputs, *self._updated)])
        results = [cell[0] for cell in self._outputs]
        for cell in self._outputs:
            cell[0] = None  # or the memory would be held until the next call
        if self._log is not None:
            for position, entries in zip(self._logged, self._log.entries(self._times), strict=True):
                results[position * self._times : position * self._times] = entries
        return results

    def _launch(self, arguments: list[Any]) -> None:
        """Launch, and put what comes of it into its place.

        In C, all of it: an interrupt that comes meanwhile is raised when both are done. Between the two the old values
        are gone and the new ones in nobody's hands.
        """
        cells = [*self._outputs, *self._updated, *([] if self._log is None else self._log.cells)]
        results = chain.from_iterable(starmap(self._run, (arguments,)))
        deque(map(setitem, cells, repeat(0), results), maxlen=0)

    def _arguments(self, inputs: Sequence[Any]) -> list[Any]:
        """Return what the launch takes: the inputs, the shared variables' values, the log."""
        logs = [] if self._log is None else self._log.cells
        lengths = []
        if self._is_steered:
            (piece,) = self._pieces
            assert isinstance(piece, Traced)
            # A copy, as the program may write into its own before this has been computed.
            inputs = [np.array(v) if i in self.inputs_on_host else v for i, v in enumerate(inputs)]
            lengths = [piece.lengths(inputs)]
        return [*lengths, *inputs, *[cell[0] for cell in (*self._storages, *logs)]]


def _compute(
    pieces: Sequence[Traced | Combination],
    storages: Sequence[list[Any]],
    updated: Sequence[list[Any]],
    logged: Sequence[int],
    *arguments: Any,
    in_loop: bool = False,
    lengths: tuple[int, ...] = (),
) -> tuple[Any, ...]:
    """Compute on what `Executable._arguments` returns; return a value for each output, updated storage and log's cell.

    ``logged`` are the positions of the outputs that go into the log, and nowhere else.  ``lengths`` are what the only
    piece takes behind its storages.
    """
    n_inputs = sum(piece.n_inputs for piece in pieces if isinstance(piece, Traced))
    n_arguments = n_inputs + len(storages)
    inputs = iter(arguments[:n_inputs])
    logs = arguments[n_arguments:]
    before = {id(s): a for s, a in zip(storages, arguments[n_inputs:n_arguments], strict=True)}
    present, combined = dict(before), set()
    outputs: list[Any] = []
    counts: Any = None
    for piece in pieces:
        if isinstance(piece, Combination):
            assert counts is None, "more than one combination in a launch"
            turn = logs[0] if in_loop else None
            present[id(piece.storage)], counts = _combined(present[id(piece.storage)], piece, turn)
            combined.add(id(piece.storage))
            continue
        try:
            results = piece.run(*islice(inputs, piece.n_inputs), *[present[id(s)] for s in piece.storages], *lengths)
        except Exception:
            piece.explain()
            raise
        outputs += results[: piece.n_outputs]
        for cell, result in zip(piece.cells[piece.n_outputs :], results[piece.n_outputs :], strict=True):
            present[id(cell)] = result
    if counts is not None:
        for key in before.keys() - combined:
            present[key] = _if(counts, present[key], before[key])
    # What is in the log is returned nowhere else: each output that is kept would have an address of its own.
    others = [output for i, output in enumerate(outputs) if i not in logged]
    numbers = Log.write(logs, [outputs[i] for i in logged]) if logs else []
    return (*others, *(present[id(storage)] for storage in updated), *numbers)


def _of_lengths(run: Callable[..., tuple[Any, ...]], lengths: tuple[int, ...], *arguments: Any) -> tuple[Any, ...]:
    return run(*arguments, lengths=lengths)


def _combined(vector: Any, piece: Combination, turn: Any) -> tuple[Any, Any]:
    """Return a vector as all ranks' will have been combined, and whether that counts."""
    import jax.numpy as jnp

    dtype, sizes = piece.exchange
    if vector.ndim != 1 or vector.size != sum(sizes):
        sizes = (vector.size,) if dtype is not None and vector.ndim == 1 else ()
    if not sizes or dtype is None and vector.nbytes <= _PIECE:
        (combined,), counts = all_reduced([vector], turn=turn)
        return combined, counts
    # XLA makes the parts of one piece one after the other, each from what computes it: these slices are never made.
    ends = np.cumsum(sizes)
    parts = [vector[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    exact: list[Any] = []
    if dtype is not None:
        # How many rows there were, which eight bits can't tell from a few more, goes as it is.
        parts, exact = [*parts[:-1], parts[-1][:-1]], [parts[-1][-1:] / piece.n_ranks]
        parts = [(part / piece.n_ranks).astype(dtype) for part in parts]
    pieces = _pieces(parts) if turn is None else [parts]
    begun: list[Any] = []
    last: Any = None
    for some in pieces[:-1]:
        array, last = started(jnp.concatenate(some), np.int32(0) if last is None else last)
        begun.append(array)
    combined, counts = all_reduced([jnp.concatenate(pieces[-1]), *exact], begun, last, turn)
    tail = [combined.pop() for _ in exact]
    return jnp.concatenate([*[array.astype(vector.dtype) for array in reversed(combined)], *tail]), counts


def _pieces(parts: Sequence[Any]) -> list[list[Any]]:
    """Return runs of parts, the last run first, of at least `_PIECE` bytes but for the last that is returned."""
    pieces: list[list[Any]] = [[]]
    for part in reversed(parts):
        if sum(other.nbytes for other in pieces[-1]) >= _PIECE:
            pieces.append([])
        pieces[-1].insert(0, part)
    return pieces


def _repeated(
    once: Callable[..., tuple[Any, ...]], times: int, n_inputs: int, changed: Sequence[int], *arguments: Any
) -> tuple[Any, ...]:
    """Compute again and again, with the next part of each input and with what the last time has left.

    ``once`` takes the inputs, and behind them what is kept; ``changed`` are the positions, among the latter, of what it
    returns.
    """
    from jax import lax

    parts = [a.reshape(times, a.shape[0] // times, *a.shape[1:]) for a in arguments[:n_inputs]]
    kept = list(arguments[n_inputs:])

    def body(state: list[Any], rows: list[Any]) -> tuple[list[Any], None]:
        for position, value in zip(changed, state, strict=True):
            kept[position] = value
        new = list(once(*rows, *kept))
        for old, value in zip(state, new, strict=True):
            if old.shape != value.shape:
                raise ValueError(
                    f"a shared variable of shape {old.shape} is updated by a value of shape {value.shape}, which can't "
                    "be in a launch that computes many times"
                )
        return new, None

    state, _ = lax.scan(body, [kept[position] for position in changed], parts, length=times)
    return tuple(state)


def _if(counts: Any, new: Any, old: Any) -> Any:
    """Return a variable's new value, or the old one if the new one doesn't count; but one of another shape always."""
    import jax.numpy as jnp

    return jnp.where(counts != 0, new, old) if new is not old and new.shape == old.shape else new


def _each_once(lists: Sequence[list[Any]]) -> list[list[Any]]:
    """Return each list once, where it first comes, told apart as objects."""
    return list({id(one): one for one in lists}.values())
