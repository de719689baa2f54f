"""The interface of engines.

An `Engine` wraps each compiled function in a `Runner`, which commands call.  The outputs of a call pass through these
steps::

    Runner.__call__ ──> store (`LazyEngine`) ──> fetch to host memory ──> reduce over the ranks ──> the user's results

An engine may also fuse a training step into one launch::

    Runner of the gradient ──> exchange of its vector (`GradientExchange`) ──> Runner of the update
    `───────────────────────────── Engine.fuse_step ─────────────────────────────────────────────´
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from synkhronos.devices import NUMPY, Device
from synkhronos.devices.communicator import Communicator
from synkhronos.engines.outputs import RankOutputs
from synkhronos.graph_libraries import GraphLibrary
from synkhronos.ranks import Command, Rank, Session
from synkhronos.variable_types import CompiledFunction, Mode, SharedVariable


class Runner:
    """A compiled function that takes arrays of the engine's device, and returns a list of outputs.

    Attributes
    ----------
    n_repeats : int
        Number of computations in one launch.  The inputs are split into ``n_repeats`` equal parts, one for each
        computation.  The list of outputs has ``n_repeats`` values of the first output, then ``n_repeats`` values of the
        second, and so on.
    host_input_positions : frozenset of int
        Positions of inputs that are passed in host memory, as NumPy arrays, whatever the engine's device is.
    """

    n_repeats = 1
    host_input_positions: frozenset[int] = frozenset()

    def __init__(self, function: Callable[..., Any]):
        self._function = function

    def __call__(self, *inputs: Any) -> list[Any]:
        """Launch the function, and return its outputs."""
        result = self._function(*inputs)
        return [] if result is None else list(result) if isinstance(result, list | tuple) else [result]

    def record_signature_if_new(self, inputs: Sequence[Any]) -> bool:
        """Record the inputs' shapes.  Return True if they are new, so that the next launch compiles for them."""
        return False

    def wait(self, results: Sequence[Any]) -> None:
        """Wait until the last launch, which returned ``results``, has been computed."""

    def get_repeated(self, n_repeats: int) -> Runner | None:
        """Return the runner, always the same, of ``n_repeats`` computations in one launch, or None if impossible."""
        return self if n_repeats == 1 else None


class StepShards(NamedTuple):
    """Variables of a step in which each rank updates its part of the parameters.

    The all-reduced variable is a matrix with a row for each rank.  The matrix is reduce-scattered after the first
    function, and all-gathered after the second.
    """

    #: Shared variable with the reduction of this rank's row, which the second function reads and updates.
    row: Any
    #: Shared variables that the second function updates, to other values on each rank.
    state_shards: Sequence[Any]
    #: Whether the second function also reads the reduction of all rows, from the matrix.
    gathers_gradient: bool


class GradientExchange(Protocol):
    """Exchange of a gradient between the ranks, within a launch; the commands of training steps implement it.

    It is an all-reduce of a shared variable or, with shards, a reduce-scatter and all-gathers.
    """

    @property
    def wire_dtype(self) -> str | None:
        """Dtype in which the values without the tail are sent, or None for their own dtype."""

    @property
    def n_tail_items(self) -> int:
        """Number of items at the vector's end that are always sent in their own dtype."""

    @property
    def op(self) -> str:
        """Name of the reduction."""

    def get_reduced_variable(self, rank: Rank) -> SharedVariable:
        """Return this rank's copy of the variable that holds the gradient."""

    def get_shards(self, rank: Rank) -> StepShards | None:
        """Return variables of a sharded optimizer, or None if every rank updates all parameters."""

    def prepare_exchange(self, rank: Rank) -> tuple[Communicator, tuple[int, ...]]:
        """Return the connected communicator and the shape, right before the launch.  Both are equal on all ranks."""


class Engine:
    """Launches compiled functions of one kind.

    The default methods are for functions that take and return NumPy arrays, and return when they have computed.

    Attributes
    ----------
    requires_static_shapes : bool
        Whether functions are compiled for arrays of fixed lengths.  If so, rows of shared variables are selected by a
        vector of indexes instead of two bounds.
    """

    requires_static_shapes = False

    def can_launch(self, library: GraphLibrary, mode: Mode) -> bool:
        """Whether this engine launches a library's functions of this mode."""
        raise NotImplementedError

    @property
    def device(self) -> Device:
        """Device whose arrays the functions take, return and store in shared variables."""
        return NUMPY

    # -- on each rank ----------------------------------------------------------------------------------------

    def make_runner(
        self, library: GraphLibrary, function: CompiledFunction, n_inputs: int, allows_opaque_outputs: bool
    ) -> Runner:
        """Wrap a compiled function.  With ``allows_opaque_outputs``, only `fetch_outputs` reads its outputs."""
        return Runner(function)

    def can_fuse_steps(self, rank: Rank) -> bool:
        """Whether `fuse_step` can fuse steps of these ranks; the same on all of them.  Default: if it is overridden."""
        return type(self).fuse_step is not Engine.fuse_step

    def fuse_step(
        self, rank: Rank, gradient: Runner, exchange: GradientExchange, updates: Sequence[Runner], n_repeats: int
    ) -> Runner | None:
        """Fuse the functions of ``n_repeats`` steps, with the exchange between them, into one launch.

        ``exchange`` exchanges the variable that ``gradient`` updates and ``updates`` read.  Return None if this rank
        can't fuse them.  Other ranks may be able to: the commands of a training step compare this, and fuse the step on
        all ranks or on none.
        """
        return None

    def get_max_repeats(self, dtype: np.dtype | None = None) -> int:
        """Return the maximal ``n_repeats`` of a launch, or with a dtype, of a launch that all-reduces arrays of it."""
        return 1

    def fetch_outputs(self, values: Sequence[Any]) -> list[Any]:
        """Return outputs as NumPy arrays, after they have been computed; large ones may stay on a GPU."""
        return self.device.to_numpy_many(values, leaves_large=True)

    def reduce_or_store_outputs(self, rank: Rank, outputs: RankOutputs) -> Any:
        """Reduce this rank's outputs of a call, or store them until they are read.

        Return the argument ``command_result`` of `make_results`.
        """
        return outputs.reduce(rank)

    # -- in the master ---------------------------------------------------------------------------------------

    def prepare_call(self, session: Session) -> None:
        """Prepare the session for a call.  The default is to send NumPy's floating-point error handling to workers."""
        _sync_float_errors(session)

    def make_results(self, session: Session, command_result: Any) -> list[Any]:
        """Return the user's results, one for each output, from the master's value of `reduce_or_store_outputs`."""
        outputs: list[Any] = command_result
        return outputs


@dataclass(frozen=True, slots=True)
class _SetFloatErrors(Command):
    """Apply the master's `numpy.geterr` on the workers."""

    settings: tuple[tuple[str, str], ...]

    def run(self, rank: Rank) -> None:
        if not rank.is_master:
            # "call" and "log" need a function or file of the master, which workers lack.
            settings: dict[str, Any] = {kind: "warn" if how in ("call", "log") else how for kind, how in self.settings}
            np.seterr(**settings)


class _SentFloatErrors(dict[str, Any]):
    """NumPy's floating-point error handling as last sent to the workers, empty before the first time."""


def _sync_float_errors(session: Session) -> None:
    """Send the master's settings (`numpy.seterr`, `numpy.errstate`) to the workers if they have changed."""
    if session.size == 1:
        return
    # The rank's registry, which is empty in a new group: its workers have not been sent any settings.
    settings, sent = np.geterr(), session.rank.registry.get_or_create(_SentFloatErrors)
    if sent != settings:
        session.run(_SetFloatErrors(tuple((kind, str(how)) for kind, how in settings.items())))
        sent.update(settings)
