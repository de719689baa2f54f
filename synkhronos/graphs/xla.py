"""How functions run that XLA compiles.

`Executable`
    A PyTensor function in JAX mode, called on device arrays: it returns before it has computed.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain, repeat, starmap
from operator import setitem
from typing import Any

import numpy as np

from synkhronos.devices import Device
from synkhronos.devices.jax.log import Log
from synkhronos.graphs.family import is_held
from synkhronos.graphs.precision import COMPILER_OPTIONS, bfloat16, in_bfloat16
from synkhronos.ranks import WeakKeys

#: The keys of random generators, by the containers that hold them as NumPy's, and those.
_streams: WeakKeys[Any, tuple[np.random.Generator, list[Any]]] = WeakKeys()
#: What JAX draws from, in the dict that PyTensor makes of a random generator.
_KEY = "jax_state"


class Executable:
    """A PyTensor function in JAX mode, called on device arrays.

    PyTensor's own call takes NumPy inputs and leaves shared variables where they were, so that NumPy values would cross
    to the device at each call.  This one calls the same compiled graph, with what the containers hold; values that the
    user put there as NumPy arrays are moved to the device first, and stay there.

    Memory of a shared variable that is updated is donated: XLA writes the new value into it.  An array that somebody
    holds beside the container (``get_value(borrow=True)``) is copied before, or it would vanish under its holder.

    Parameters
    ----------
    function : pytensor.compile.Function
        Compiled in JAX mode.
    n_inputs : int
        How many inputs it takes; all behind these are shared variables.
    device : Device
        Where arrays live.
    log : bool
        Whether to return outputs that are numbers as a log's entries.
    """

    def __init__(self, function: Any, n_inputs: int, device: Device, log: bool = False):
        import jax
        import jax.numpy as jnp

        # PyTensor's dispatchers, imported when the first function is compiled, turn this off where floatX is float32.
        # Whatever turned it on again after the first call would have that function compiled twice.
        jax.config.update("jax_enable_x64", True)
        self._device = device
        self._n_inputs = n_inputs
        thunk, graph = function.vm, function.maker.fgraph
        self._graph, self._thunk = graph, thunk
        specs = function.maker.expanded_inputs
        generators = {i: storage[0] for i, storage in enumerate(thunk.inputs) if isinstance(storage[0], dict)}
        inputs = [_stream(spec.value, storage) for spec, storage in zip(specs, thunk.inputs, strict=True)]
        moved = {i for i, j in graph.update_mapping.items() if j in generators}
        self._storages: list[list[Any]] = inputs[n_inputs:]
        # Position among outputs, and the container's storage that takes the output.
        updates = [(i, inputs[j]) for i, j in graph.update_mapping.items()]
        n_outputs = len(graph.outputs) - len(updates)
        #: Where each result of a launch goes: a container's storage, or a list of its own.
        self._cells: list[list[Any]] = [[None] for _ in graph.outputs]
        for position, storage in updates:
            self._cells[position] = storage
        self._outputs = self._cells[:n_outputs]
        updated = {id(storage) for _, storage in updates}
        arrays = [isinstance(storage[0], np.ndarray) or device.holds(storage[0]) for storage in self._storages]
        donated = [id(s) in updated and is_array for s, is_array in zip(self._storages, arrays, strict=True)]
        self._copy = jnp.copy
        self._log: Log | None = None
        #: Whether scalar inputs decide shapes: PyTensor wants their values, and has it compiled anew for each.
        self.inputs_on_host = not hasattr(thunk.jit_fn, "__wrapped__")
        if self.inputs_on_host:
            self._run = _by_keys(thunk.jit_fn, generators, moved)
            self._donated: list[list[Any]] = []
            return

        traced = _by_keys(_converted(graph, thunk.storage_map), generators, moved)
        types = [output.type for output in graph.outputs[:n_outputs]]
        self._logged = [i for i, kind in enumerate(types) if log and getattr(kind, "ndim", None) == 0]
        self._dtypes = [np.dtype(types[i].dtype) for i in self._logged]
        self._cells = [cell for i, cell in enumerate(self._cells) if i not in self._logged]
        self._outputs = [cell for i, cell in enumerate(self._outputs) if i not in self._logged]
        if self._logged:
            self._log = Log(self._dtypes)
        n_arguments, logged = len(inputs), self._logged

        def run(*arguments: Any) -> tuple[Any, ...]:
            outputs = traced(*arguments[:n_arguments])
            if not logged:
                return outputs
            # What is in the log is returned nowhere else: each output that is kept would have an address of its own.
            others = (output for i, output in enumerate(outputs) if i not in logged)
            return (*others, *Log.write(arguments[n_arguments:], [outputs[i] for i in logged]))

        # A variable whose new value has another shape can't be written into the old memory, which is no mistake.
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        self._donated = [storage for storage, is_donated in zip(self._storages, donated, strict=True) if is_donated]
        positions = [n_inputs + i for i, is_donated in enumerate(donated) if is_donated]
        if self._log is not None:
            positions += range(n_arguments, n_arguments + len(self._log.cells))
        # Old values that nothing is computed from are kept as arguments: the new ones then take their place, and
        # addresses stay the same from launch to launch, as the launches that XLA records need them.
        options = COMPILER_OPTIONS if bfloat16() else None
        self._run = jax.jit(run, donate_argnums=tuple(positions), keep_unused=True, compiler_options=options)

    def __call__(self, *inputs: Any) -> list[Any]:
        """Start the computation, and return its outputs: arrays that will be there when they are read."""
        for storage in self._storages:
            if type(storage[0]) is np.ndarray:
                storage[0] = self._device.from_host(storage[0])
        for storage in self._donated:
            if is_held(storage):
                storage[0] = self._copy(storage[0])
        if self._log is not None and self._log.full:
            self._log = Log(self._dtypes)
        arguments = self._arguments(inputs)
        self._device.launching()
        try:
            self._launch(arguments)
        except BaseException as error:
            if self._log is not None:  # whether this launch has written there is not known
                self._log = Log(self._dtypes)
            if isinstance(error, Exception):
                self._explain()
            raise
        finally:
            del arguments
        if self.inputs_on_host:
            self._device.wait([cell[0] for cell in self._cells])
        elif self._n_inputs:
            self._device.launched([cell[0] for cell in self._cells])
        results = [cell[0] for cell in self._outputs]
        for cell in self._outputs:
            cell[0] = None  # or the memory would be held until the next call
        if self._log is not None:
            for position, entry in zip(self._logged, self._log.entries(), strict=True):
                results.insert(position, entry)
        return results

    def _launch(self, arguments: list[Any]) -> None:
        """Launch, and put what comes of it into its place.

        In C, all of it: an interrupt that comes meanwhile is raised when both are done. Between the two the old values
        are gone and the new ones in nobody's hands.
        """
        cells = self._cells if self._log is None else [*self._cells, *self._log.cells]
        results = chain.from_iterable(starmap(self._run, (arguments,)))
        deque(map(setitem, cells, repeat(0), results), maxlen=0)

    def _arguments(self, inputs: Sequence[Any]) -> list[Any]:
        """Return what the launch takes: the inputs, the shared variables' values, the log."""
        logs = [] if self._log is None else self._log.cells
        return [*inputs, *[cell[0] for cell in (*self._storages, *logs)]]

    def _explain(self) -> None:
        """Raise the present exception again with PyTensor's words on where in the graph it came from."""
        from pytensor.link.utils import raise_with_op

        node = next((output.owner for output in self._graph.outputs if output.owner is not None), None)
        if node is not None:
            raise_with_op(self._graph, node, self._thunk)


def _stream(container: Any, storage: list[Any]) -> list[Any]:
    """Return the storage of a function's input; for a random generator one with its key, the same in all functions.

    PyTensor gives each function a copy of its own, so that two functions, or the variants of one, would draw the same
    numbers again.
    """
    if not isinstance(storage[0], dict):
        return storage
    generator = container.storage[0]
    known = _streams.get(container)
    if known is None or known[0] is not generator:  # the first, or the user has put another one there since
        known = _streams[container] = generator, [np.array(storage[0][_KEY])]
    return known[1]


def _by_keys(run: Callable[..., Any], generators: dict[int, dict[str, Any]], moved: set[int]) -> Callable[..., Any]:
    """Return a function that takes and returns random generators' keys alone.

    PyTensor's dict has five numbers beside the key that nothing is computed from: each would be copied at each launch.
    ``generators`` has the dicts by their positions among the arguments; ``moved`` are the positions of new ones among
    the results.
    """

    def run_by_keys(*arguments: Any) -> tuple[Any, ...]:
        whole = [{**generators[i], _KEY: a} if i in generators else a for i, a in enumerate(arguments)]
        return tuple(result[_KEY] if i in moved else result for i, result in enumerate(run(*whole) or ()))

    return run_by_keys


def _converted(graph: Any, storage_map: Any) -> Callable[..., Any]:
    """Return a graph as a function of JAX arrays in which everything has the dtype that the graph says.

    PyTensor's own conversion follows JAX's promotions, by which a float32 divided by a length is a float64, and with it
    all that is computed from it: a gradient of a mean, say.
    """
    from pytensor.link.jax.dispatch import jax_funcify, jax_typify
    from pytensor.link.utils import fgraph_to_python
    from pytensor.tensor.basic import ARange

    reduced = bfloat16()

    def convert(op: Any, node: Any = None, **kwargs: Any) -> Any:
        run = jax_funcify(op, node=node, **kwargs)
        if isinstance(op, ARange):
            run = _range(node)
        if node is None or not callable(run):
            return run
        if reduced:
            run = in_bfloat16(run, node, graph)
        dtypes = [getattr(output.type, "dtype", None) for output in node.outputs]
        if len(dtypes) == 1:
            return lambda *inputs: _as(run(*inputs), dtypes[0])
        return lambda *inputs: tuple(map(_as, run(*inputs), dtypes))

    converted: Callable[..., Any] = fgraph_to_python(
        graph, convert, type_conversion_fn=jax_typify, fgraph_name="synkhronos_graph", storage_map=storage_map
    )
    return converted


def _range(node: Any) -> Callable[..., Any]:
    """Return what computes a range whose bounds are constants or lengths, as `jax_funcify` has made sure.

    PyTensor 3.0, the newest for Python 3.11, has NumPy subtract a constant of eight bits from a length of more.
    """
    import jax.numpy as jnp
    from pytensor.graph.basic import Constant

    dtype = node.outputs[0].type.dtype
    constants = [np.asarray(bound.data) if isinstance(bound, Constant) else None for bound in node.inputs]
    constants = [c.astype(np.int64) if c is not None and c.dtype.kind in "bi" else c for c in constants]

    def run(*bounds: Any) -> Any:
        start, stop, step = (b if c is None else c for b, c in zip(bounds, constants, strict=True))
        return jnp.arange(start, stop, step, dtype=dtype)

    return run


def _as(value: Any, dtype: str | None) -> Any:
    """Return an array in a dtype; what is none as it is."""
    if dtype is None or not hasattr(value, "astype") or value.dtype == dtype:
        return value
    return value.astype(dtype)
