"""Functions that XLA compiles: PyTensor's in JAX mode.

`Xla`
    The engine.
`Executable`
    PyTensor functions in JAX mode, called on device arrays: it returns before it has computed.
`Combination`
    What may stand between two of them that are launched as one.
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, islice, repeat, starmap
from operator import setitem
from typing import Any, NamedTuple

import numpy as np

from synkhronos.devices import JAX, Device
from synkhronos.devices.jax.foreign import all_reduced, combining, started
from synkhronos.devices.jax.log import LAUNCHES, Log
from synkhronos.engines.base import Combined, Runner
from synkhronos.engines.gradual import Gradual
from synkhronos.engines.lazy import LazyEngine
from synkhronos.graphs import GraphLibrary
from synkhronos.graphs.library import is_referenced
from synkhronos.lowering.jax_function import JaxFunction
from synkhronos.lowering.precision import COMPILER_OPTIONS, computes_in_bfloat16
from synkhronos.ranks import Rank
from synkhronos.ranks.interrupts import defer_signals

#: Chains that a function keeps: those that were used last.
_CHAINS = 16


#: Bytes of a vector, at least, that are combined at once: what is computed later comes beside that.
_PIECE = 25_000_000


class Combination(NamedTuple):
    """Has the ranks' new values of a variable combined; if that turns out not to count, no other variable is updated.

    Attributes
    ----------
    storage : list of one array
        The variable's container.
    exchange : str or None
        In which dtype it travels, all but its tail; None for its own.
    n_ranks : int
        By how many to divide what travels in another dtype; what travels in its own isn't divided here.
    tail : int
        The number of items at its end that travel in its own dtype in any case.
    """

    storage: list[Any]
    exchange: str | None = None
    n_ranks: int = 1
    tail: int = 1


class Executable(Runner):
    """PyTensor functions in JAX mode, called on device arrays; usually one.

    PyTensor's own call takes NumPy inputs and leaves shared variables where they were, so that NumPy values would cross
    to the device at each call.  This one calls the same compiled graphs, with what the containers hold; values that the
    user put there as NumPy arrays are moved to the device first, and stay there.

    Memory of a shared variable that is updated is donated: XLA writes the new value into it.  An array that somebody
    holds beside the container (``get_value(borrow=True)``) is copied before, or it would vanish under its holder.

    Parameters
    ----------
    pieces : list of JaxFunction
        What is computed, in this order, in one launch.
    combination : Combination, optional
        Of a variable that the first of them updates; the others see what has been combined.
    log : bool
        Whether to return outputs that are numbers as a log's entries.
    times : int
        As in `Runner`; if it is many, all outputs have to be numbers in the log.
    """

    def __init__(
        self, pieces: Sequence[JaxFunction], combination: Combination | None = None, log: bool = False, times: int = 1
    ):
        import jax
        import jax.numpy as jnp

        # PyTensor's dispatchers, imported when the first function is compiled, turn this off where floatX is float32.
        # Whatever turned it on again after the first call would have that function compiled twice.
        jax.config.update("jax_enable_x64", True)
        self._pieces = list(pieces)
        self._logs_numbers, self.times = log, times
        self._chains: dict[Any, Executable] = {}
        self._shapes: set[Any] = set()
        self._n_inputs = sum(piece.n_inputs for piece in pieces)
        self._storages = _each_once([storage for piece in pieces for storage in piece.storages])
        #: Where the results of a launch go: first what is returned, then the containers' new values.
        self._outputs = [cell for piece in pieces for cell in piece.cells[: piece.n_outputs]]
        # In the variables' order: JAX gives each new value the memory of the first variable of its shape that is left.
        # With another's than its own, XLA would copy one of the two, and addresses would change from launch to launch.
        updated = {id(cell) for piece in pieces for cell in piece.cells}
        self._updated = [storage for storage in self._storages if id(storage) in updated]
        self._donated = _each_once([storage for piece in pieces for storage in piece.donated])
        self._copy = jnp.copy
        self._log: Log | None = None
        self._is_interrupted = False
        #: Which inputs' values are looked at, as lengths follow from them.
        self.on_host = frozenset(
            position
            for piece in pieces[:1]
            if piece.length_graph is not None
            for position in piece.length_graph.deciding_inputs
        )
        self._has_lengths = any(piece.length_graph is not None for piece in pieces)
        assert len(pieces) == 1 or not self._has_lengths
        types = [kind for piece in pieces for kind in piece.types]
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
        options = COMPILER_OPTIONS if computes_in_bfloat16() else None
        # Without a reference to this, or only the garbage collector would free what it holds.
        run = partial(_compute, self._pieces, combination, self._storages, self._updated, self._logged)
        if times > 1:
            at = {id(storage): i for i, storage in enumerate(self._storages)}
            logs = range(len(at), len(at) + 1 + len(self._logged))
            changed = [*(at[id(cell)] for cell in self._updated), *logs]
            run = partial(_repeated, partial(run, in_loop=True), times, self._n_inputs, changed)
        if self._has_lengths:
            # The lengths come first, and are constants to XLA, which compiles anew for others.
            run, positions = partial(_of_lengths, run), [position + 1 for position in positions]
            self._run = jax.jit(
                run, static_argnums=0, donate_argnums=tuple(positions), keep_unused=True, compiler_options=options
            )
        else:
            self._run = jax.jit(run, donate_argnums=tuple(positions), keep_unused=True, compiler_options=options)

    def chain(
        self, combination: Combination | None = None, then: Executable | None = None, times: int = 1
    ) -> Executable | None:
        """Return what does in one launch what this one does, combines, and does what another one does; so many times.

        The same one each time; None where inputs decide shapes, where what is combined isn't computed here, and for
        many times where outputs are no numbers.
        """
        key = combination and (id(combination.storage), *combination[1:]), then, times
        chained = self._chains.pop(key, None)
        if chained is None:
            executables = [self] if then is None else [self, then]
            can = combination is None or any(cell is combination.storage for cell in self._pieces[0].cells)
            can = can and not any(one._has_lengths for one in executables)
            if times > 1:
                can = can and times <= LAUNCHES and not any(one._outputs for one in executables)
            if not can:
                return None
            pieces = [piece for one in executables for piece in one._pieces]
            assert len(pieces) == len(executables)  # of a chain the combination would be lost
            while len(self._chains) >= _CHAINS:
                del self._chains[next(iter(self._chains))]
            chained = Executable(pieces, combination, self._logs_numbers, times)
        self._chains[key] = chained  # behind all others
        return chained

    def repeated(self, times: int) -> Executable | None:
        """Return what does it many times in one launch."""
        return self if times == 1 else self.chain(times=times)

    def is_new(self, inputs: Sequence[Any]) -> bool:
        """Whether XLA compiles for inputs of these shapes."""
        shapes = tuple([getattr(value, "shape", ()) for value in inputs])
        if shapes in self._shapes:
            return False
        self._shapes.add(shapes)
        return True

    def __call__(self, *inputs: Any) -> list[Any]:
        """Start the computation, and return its outputs: arrays that will be there when they are read."""
        for storage in self._storages:
            if type(storage[0]) is np.ndarray:
                storage[0] = JAX.from_host(storage[0])
        for storage in self._donated:
            if is_referenced(storage):
                with defer_signals():  # as a log's beginning
                    storage[0] = self._copy(storage[0])
        if self._log is not None and (self._is_interrupted or not self._log.has_room(self.times)):
            self._log = Log(self._dtypes)
        arguments = self._arguments(inputs)
        JAX.launching()
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
            JAX.launched([cell[0] for cell in (*self._outputs, *self._updated)])
        results = [cell[0] for cell in self._outputs]
        for cell in self._outputs:
            cell[0] = None  # or the memory would be held until the next call
        if self._log is not None:
            for position, entries in zip(self._logged, self._log.entries(self.times), strict=True):
                results[position * self.times : position * self.times] = entries
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
        if self._has_lengths:
            (piece,) = self._pieces
            # A copy, as the program may write into its own before this has been computed.
            inputs = [np.array(v) if i in self.on_host else v for i, v in enumerate(inputs)]
            lengths = [piece.compute_lengths(inputs)]
        return [*lengths, *inputs, *[cell[0] for cell in (*self._storages, *logs)]]


def _compute(
    pieces: Sequence[JaxFunction],
    combination: Combination | None,
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
    n_inputs = sum(piece.n_inputs for piece in pieces)
    n_arguments = n_inputs + len(storages)
    inputs = iter(arguments[:n_inputs])
    logs = arguments[n_arguments:]
    before = {id(s): a for s, a in zip(storages, arguments[n_inputs:n_arguments], strict=True)}
    present = dict(before)
    outputs: list[Any] = []
    counts: Any = None
    for piece in pieces:
        given = [*islice(inputs, piece.n_inputs), *[present[id(s)] for s in piece.storages], *lengths]
        try:
            if combination is not None and piece is pieces[0]:
                results, counts = _combined(piece, given, combination, logs[0] if in_loop else None)
            else:
                results = piece.run(*given)
        except Exception:
            piece.explain()
            raise
        outputs += results[: piece.n_outputs]
        for cell, result in zip(piece.cells[piece.n_outputs :], results[piece.n_outputs :], strict=True):
            present[id(cell)] = result
    if combination is not None:
        for key in before.keys() - {id(combination.storage)}:
            present[key] = _if(counts, present[key], before[key])
    # What is in the log is returned nowhere else: each output that is kept would have an address of its own.
    others = [output for i, output in enumerate(outputs) if i not in logged]
    numbers = Log.write(logs, [outputs[i] for i in logged]) if logs else []
    return (*others, *(present[id(storage)] for storage in updated), *numbers)


def _of_lengths(run: Callable[..., tuple[Any, ...]], lengths: tuple[int, ...], *arguments: Any) -> tuple[Any, ...]:
    return run(*arguments, lengths=lengths)


def _combined(piece: JaxFunction, given: Sequence[Any], combination: Combination, turn: Any) -> tuple[list[Any], Any]:
    """Return a function's results, a vector among them as all ranks' will have been combined; and whether that counts.

    ``turn`` is another number each time, in a loop.
    """
    import jax.numpy as jnp

    at = next(i for i, cell in enumerate(piece.cells) if cell is combination.storage)
    gradual = Gradual(piece.run, given, piece.n_outputs, at)
    parts = gradual.parts
    own = parts[0].aval.dtype
    dtype = combination.exchange if parts[0].aval.ndim == 1 else None
    tail_items = combination.tail if dtype is not None else 0
    pieces = _pieces(parts, jnp.dtype(dtype or own).itemsize, tail_items) if turn is None else [parts]

    def sent(some: list[Any]) -> Any:
        """Return what travels of some parts."""
        values = gradual.values(some)
        if dtype is not None:
            values = _split(values, tail_items)[0] if some is pieces[0] else values
            values = [(value / combination.n_ranks).astype(dtype) for value in values]
        return values[0] if len(values) == 1 else jnp.concatenate(values)

    begun: list[Any] = []
    last: Any = None
    for some in pieces[:-1]:
        array, last = started(sent(some), np.int32(0) if last is None else last)
        last = gradual.hold(last)
        begun.append(array)
    rest = [sent(pieces[-1])]
    if dtype is not None:
        # How many rows there were, which eight bits can't tell from a few more, goes as it is; so do running averages.
        rest.append(jnp.concatenate(_split(gradual.values(pieces[0]), tail_items)[1]) / combination.n_ranks)
    arrays, counts = all_reduced(rest, begun, last, turn)
    tail = [arrays.pop()] if dtype is not None else []
    arrays = [*[array.astype(own) for array in reversed(arrays)], *tail]
    return gradual.results(arrays[0] if len(arrays) == 1 else jnp.concatenate(arrays)), counts


def _pieces(parts: Sequence[Any], itemsize: int, tail: int = 0) -> list[list[Any]]:
    """Return runs of parts, the last run first, of at least `_PIECE` bytes but for the last that is returned.

    The first run has more than the vector's last ``tail`` items.
    """
    pieces: list[list[Any]] = [[]]
    for part in reversed(parts):
        size = sum(other.aval.size for other in pieces[-1])
        if size * itemsize >= _PIECE and (len(pieces) > 1 or size > tail):
            pieces.append([])
        pieces[-1].insert(0, part)
    return pieces


def _split(vectors: Sequence[Any], tail: int) -> tuple[list[Any], list[Any]]:
    """Split vectors, one after another, in front of their last ``tail`` items."""
    first = list(vectors)
    last: list[Any] = []
    while tail > 0:
        vector = first.pop()
        last.insert(0, vector[-tail:])
        if len(vector) > tail:
            first.append(vector[:-tail])
        tail -= len(vector)
    return first, last


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


class _Together(Runner):
    """What has the ranks combine in the middle of its launch; they launch when all are about to do so."""

    def __init__(self, rank: Rank, chain: Executable, combined: Combined):
        self._rank, self._chain, self._combined = rank, chain, combined
        self.times = chain.times

    def is_new(self, inputs: Sequence[Any]) -> bool:
        """Whether XLA compiles for inputs of these shapes."""
        return self._chain.is_new(inputs)

    def __call__(self, *inputs: Any) -> list[Any]:
        """Launch, and meet the others behind it."""
        communicator, shape = self._combined.agree(self._rank)
        # What is exchanged in another dtype has been divided before.
        op = "sum" if self._combined.exchange else self._combined.op
        combine = Combine(self._rank, communicator, op, shape, self.times > 1)

        # Nothing may be raised in what XLA calls; and when this rank has launched, all will have in a moment, so that
        # the updates are applied on all ranks, or, if one of them fails, on none.
        with defer_signals() as signals:
            with combining(combine, self.times):
                results = self._chain(*inputs)
            signals.restart_patience()
            communicator.meet(signals.deliver_if_late)
            self._rank.commit()
        return results


class Combine:
    """Combines the ranks' gradients in the middle of a launch: what XLA calls comes here (see `devices.jax.foreign`).

    Each call brings the stream on which its work has its place; None where XLA knows of none.
    """

    def __init__(self, rank: Rank, communicator: Any, op: str, shape: tuple[int, ...], many: bool):
        self._rank, self._communicator, self._op, self._many = rank, communicator, op, many
        self._shape = shape
        self._begun = 0

    def start(self, spans: Sequence[Any], stream: int | None) -> None:
        """Begin to combine what the stream has computed, a part of the vector, beside what it computes next."""
        self._communicator.start_within(spans, self._op, stream)
        self._begun += sum(span.n_items for span in spans)

    def finish(self, spans: Sequence[Any], counts: int, stream: int | None) -> None:
        """Combine the rest, if the ranks have agreed on so many items, and have the stream wait for all of it.

        At ``counts`` there is an int32 of 0; when what has been combined counts, it is to become 1.
        """
        if self._many:
            self._rank.commit()  # the first of them may count though a later one fails
        count, self._begun = self._begun + sum(span.n_items for span in spans), 0
        if count != math.prod(self._shape):
            self.wait(stream)
            raise ValueError(f"all_reduce: expected shape {self._shape}, as before the launch, got {count} items")
        self._communicator.all_reduce_within(spans, self._op, counts, stream)

    def wait(self, stream: int | None) -> None:
        """Have the stream wait for what was started, which does not count: something went wrong since."""
        self._communicator.wait_within(stream)


class Xla(LazyEngine):
    """Runs PyTensor's functions in JAX mode."""

    fixed_lengths = True

    def runs(self, library: GraphLibrary, mode: Any) -> bool:
        """Those of JAX mode."""
        return library.is_xla_mode(mode)

    @property
    def device(self) -> Device:
        """JAX arrays."""
        return JAX

    def runner(self, library: GraphLibrary, function: Any, n_inputs: int, fetched: bool) -> Runner:
        """Return a function that takes and returns JAX arrays; numbers as a log's entries, which `fetch` reads."""
        return Executable([JaxFunction(function, n_inputs, JAX)], log=fetched)

    def chain(self, rank: Rank, first: Runner, combined: Combined, second: Runner, times: int) -> Runner | None:
        """Return both in one launch, with NCCL's work in between.

        Ranks meet and combine in the same order as without it, as calls whose outputs are read later meet nowhere when
        they are compiled: they need not agree on it.
        """
        assert isinstance(first, Executable) and isinstance(second, Executable)
        if rank.size == 1:
            return first.chain(then=second, times=times)
        shared = combined.shared(rank)
        value = shared.container.storage[0]
        # What the user may have put there is moved, or cast, on the long way.
        if not JAX.holds(value) or value.dtype != shared.type.dtype or not JAX.combines_within(value.dtype):
            return None
        combination = Combination(shared.container.storage, combined.exchange, rank.size, combined.tail)
        chain = first.chain(combination, second, times=times)
        return None if chain is None else _Together(rank, chain, combined)

    def most_at_once(self, combined: np.dtype | None = None) -> int:
        """Return how many numbers a log has; on CPU cores 1: in loops XLA computes convolutions by one thread."""
        can = JAX.on_gpu if combined is None else JAX.combines_within(combined)
        return LAUNCHES if can else 1


ENGINE = Xla()
