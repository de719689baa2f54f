"""What the rooms above ask of an engine.

`Engine`
    Runs compiled functions of one kind.
`Runner`
    One compiled function, as ranks run it.
`Combined`
    What the ranks combine between two functions in one launch, and how it travels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from synkhronos.devices import HOST, Device
from synkhronos.engines.float_errors import follow
from synkhronos.graphs import GraphLibrary
from synkhronos.ranks import Rank, Session


class Runner:
    """A compiled function, as ranks run it: called with arrays of the engine's device, it returns a list of outputs.

    Parameters
    ----------
    function : callable
        Returns a list of outputs, or the only one, or None.

    Attributes
    ----------
    times : int
        How many times a launch computes, each time on the next of as many equal parts of the inputs.  It returns each
        output as often, one output after the other.
    on_host : collection of int
        The positions of inputs that it takes as NumPy arrays, wherever the others are.
    """

    times = 1
    on_host: frozenset[int] = frozenset()

    def __init__(self, function: Callable[..., Any]):
        self._function = function

    def __call__(self, *inputs: Any) -> list[Any]:
        """Run it once."""
        result = self._function(*inputs)
        return [] if result is None else list(result) if isinstance(result, list | tuple) else [result]

    def is_new(self, inputs: Sequence[Any]) -> bool:
        """Whether something is compiled for inputs of these shapes when they come for the first time."""
        return False

    def repeated(self, times: int) -> Runner | None:
        """Return what runs it so many times in one launch; the same one each time, None where there is none."""
        return self if times == 1 else None


class Combined(Protocol):
    """A variable whose values on the ranks are combined between two functions of one launch."""

    @property
    def exchange(self) -> str | None:
        """In which dtype it travels, all but its tail; None for its own."""

    @property
    def tail(self) -> int:
        """The number of items at its end that travel in its own dtype in any case."""

    @property
    def op(self) -> str:
        """By which reduction."""

    def shared(self, rank: Rank) -> Any:
        """Return this rank's copy of the variable."""

    def agree(self, rank: Rank) -> tuple[Any, tuple[int, ...]]:
        """Return the communicator, and the shape that all ranks have: to be called by all right before they launch."""


class Engine:
    """Runs compiled functions of one kind.

    What is here is an engine's whose functions return when they have computed, and whose arrays are NumPy's.

    Attributes
    ----------
    fixed_lengths : bool
        Whether functions are compiled for arrays of fixed lengths: then rows of shared variables are chosen by as many
        indexes, and not by their bounds.
    """

    fixed_lengths = False

    def runs(self, library: GraphLibrary, mode: Any) -> bool:
        """Whether a library's functions of this mode are for this engine."""
        raise NotImplementedError

    @property
    def device(self) -> Device:
        """What holds the values with which functions compute."""
        return HOST

    # -- on each rank ----------------------------------------------------------------------------------------

    def runner(self, library: GraphLibrary, function: Any, n_inputs: int, fetched: bool) -> Runner:
        """Return a compiled function as ranks run it; ``fetched``: nothing but `fetch` looks at its outputs."""
        return Runner(function)

    def chain(self, rank: Rank, first: Runner, combined: Combined, second: Runner, times: int) -> Runner | None:
        """Return what does in one launch what a function does, then has the ranks combine a variable, then another's.

        All of it many times, as in `Runner`.  None where there is no such launch.
        """
        return None

    def most_at_once(self, combined: np.dtype | None = None) -> int:
        """Return how many times one launch may compute, and have the ranks combine arrays of a dtype each time."""
        return 1

    def fetch(self, values: Sequence[Any]) -> list[Any]:
        """Return outputs on the host, once they are computed."""
        return self.device.fetch(values)

    def collect(self, rank: Rank, outputs: Any) -> Any:
        """Return, in the master, what `results` makes the outputs of: here, the reductions of all ranks' outputs.

        ``outputs`` is what this rank has computed in a call (``synkhronos.function.outputs.RankOutputs``).
        """
        return outputs.reduce(rank)

    # -- in the master ---------------------------------------------------------------------------------------

    def before_call(self, session: Session) -> None:
        """Do what comes before a call: here, have the workers treat floating-point errors as the master does."""
        follow(session)

    def results(self, session: Session, collected: Any) -> list[Any]:
        """Return what the user gets, one for each output, from what the master's `collect` has returned."""
        outputs: list[Any] = collected
        return outputs
