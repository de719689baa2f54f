"""Compiled PyTensor functions as functions of JAX arrays, for XLA to trace.

`Traced`
    One of them.
`follow_streams`, `stream_of`, `set_stream_of`
    Where random generators are in their streams.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from synkhronos.devices import Device
from synkhronos.lowering.precision import bfloat16, in_bfloat16
from synkhronos.lowering.scatter import in_copies
from synkhronos.ranks import WeakKeys

if TYPE_CHECKING:  # it needs PyTensor, and training functions with Theano come by here
    from synkhronos.lowering.lengths import LengthGraph

#: The keys of random generators, by the containers that hold them as NumPy's, and those.
_streams: WeakKeys[Any, tuple[np.random.Generator, Any]] = WeakKeys()
#: What JAX draws from, in the dict that PyTensor makes of a random generator.
_KEY = "jax_state"


class Traced:
    """A PyTensor function, compiled in JAX mode, as a function of JAX arrays on a device.

    All inputs behind the first ``n_inputs`` are shared variables.
    """

    def __init__(self, function: Any, n_inputs: int, device: Device):
        self.n_inputs = n_inputs
        self._thunk, self._graph = thunk, graph = function.vm, function.maker.fgraph
        specs = function.maker.expanded_inputs
        generators = {i: storage[0] for i, storage in enumerate(thunk.inputs) if isinstance(storage[0], dict)}
        inputs = [_stream(spec.value, storage) for spec, storage in zip(specs, thunk.inputs, strict=True)]
        moved = {i for i, j in graph.update_mapping.items() if j in generators}
        #: The containers of the shared variables: functions that share a variable have the same list.
        self.storages: list[list[Any]] = inputs[n_inputs:]
        #: Where each result goes: a list of its own for an output, one of `storages` for what updates it.
        self.cells: list[list[Any]] = [[None] for _ in graph.outputs]
        for position, j in graph.update_mapping.items():
            self.cells[position] = inputs[j]
        self.n_outputs = len(graph.outputs) - len(graph.update_mapping)
        #: PyTensor's types of the outputs.
        self.types = [output.type for output in graph.outputs[: self.n_outputs]]
        updated = {id(cell) for cell in self.cells[self.n_outputs :]}
        #: Those of `storages` whose arrays a launch may write into.
        self.donated = [
            storage
            for storage in self.storages
            if id(storage) in updated and (isinstance(storage[0], np.ndarray) or device.holds(storage[0]))
        ]
        #: Says what lengths follow from the values of its inputs; `run` takes these behind the values in `storages`.
        self.length_graph: LengthGraph | None = thunk.jit_fn.length_graph
        run = (
            _converted(graph, thunk.storage_map)
            if self.length_graph is None
            else _converted(self.length_graph.graph, {})
        )
        #: Takes the inputs and the values in `storages`; returns a value for each of `cells`.
        self.run = _by_keys(run, generators, moved)

    def lengths(self, inputs: Sequence[Any]) -> tuple[int, ...]:
        """Return the lengths that `run` takes, for the values of its inputs."""
        values = [*inputs, *[storage[0] for storage in self.storages]]
        return () if self.length_graph is None else self.length_graph.lengths(values)

    def explain(self) -> None:
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


class _OwnKeys:
    """The key that the user's own functions draw from, as a list of one: PyTensor keeps a dict in each function."""

    def __init__(self) -> None:
        self.storages: list[list[Any]] = []

    def __getitem__(self, index: int) -> Any:
        return np.asarray(self.storages[0][0][_KEY])

    def __setitem__(self, index: int, key: Any) -> None:
        for storage in self.storages:
            storage[0] = {**storage[0], _KEY: key}


def follow_streams(function: Any) -> None:
    """Have `stream_of` and `set_stream_of` speak of what a function draws that the user has compiled in JAX mode."""
    for spec, storage in zip(function.maker.expanded_inputs, function.vm.inputs, strict=True):
        if isinstance(storage[0], dict):
            known = _streams.get(spec.value)
            keys = known[1] if known is not None else None
            if not isinstance(keys, _OwnKeys):
                keys = _OwnKeys()
                _streams[spec.value] = spec.value.storage[0], keys
            if not any(storage is each for each in keys.storages):
                keys.storages.append(storage)


def check_key(container: Any, generator: np.random.Generator) -> None:
    """Raise TypeError if functions draw from the container's key, and PyTensor makes none of the generator."""
    kinds = np.random.PCG64 | np.random.PCG64DXSM
    if _streams.get(container) is not None and not isinstance(generator.bit_generator, kinds):
        raise TypeError(f"in JAX mode PyTensor takes PCG64's numbers, got {type(generator.bit_generator).__name__}'s")


def stream_of(container: Any, generator: np.random.Generator) -> np.random.Generator:
    """Return a copy of what is in a container, changed to one of which PyTensor makes the key that functions draw from.

    Unless none has drawn from it yet, or the user has put another generator there since.
    """
    known = _streams.get(container)
    if known is None or known[0] is not container.storage[0]:
        return generator
    state: Any = generator.bit_generator.state
    low, high = (int(word) for word in np.asarray(known[1][0]))
    state["state"]["state"] = state["state"]["state"] >> 64 << 64 | high << 32 | low
    generator.bit_generator.state = state
    return generator


def set_stream_of(container: Any) -> None:
    """Have functions draw from the generator that was put into a container, if some draw from it already."""
    known = _streams.get(container)
    if known is not None:
        from pytensor.link.jax.dispatch import jax_typify  # JAX is there if such functions are, and need not be else

        generator = container.storage[0]
        known[1][0] = np.array(jax_typify(generator)[_KEY])
        _streams[container] = generator, known[1]


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

    from synkhronos.lowering.linker import to_strong_array

    reduced = bfloat16()

    def convert(op: Any, node: Any = None, **kwargs: Any) -> Any:
        run = jax_funcify(op, node=node, **kwargs)
        if node is None or not callable(run):
            return run
        run = in_copies(run, node)
        if reduced:
            run = in_bfloat16(run, node, graph)
        dtypes = [getattr(output.type, "dtype", None) for output in node.outputs]
        if len(dtypes) == 1:
            return lambda *inputs: _as(run(*inputs), dtypes[0])
        return lambda *inputs: tuple(map(_as, run(*inputs), dtypes))

    converted: Callable[..., Any] = fgraph_to_python(
        graph, convert, type_conversion_fn=jax_typify, fgraph_name="synkhronos_graph", storage_map=storage_map
    )
    dtypes = [getattr(output.type, "dtype", None) for output in graph.outputs]
    return lambda *inputs: tuple(map(to_strong_array, converted(*inputs) or (), dtypes))


def _as(value: Any, dtype: str | None) -> Any:
    """Return an array in a dtype; what is none as it is."""
    if dtype is None or not hasattr(value, "astype") or value.dtype == dtype:
        return value
    return value.astype(dtype)
