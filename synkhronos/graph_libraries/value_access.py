"""Reading and setting of shared variables: arrays, and the states of random generators."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from synkhronos.variable_types import CompiledFunction, SharedVariable


class ValueAccess(ABC):
    """Access to the values of a graph library's shared variables."""

    def borrow_value(self, shared: SharedVariable) -> Any:
        """Return a shared variable's value without a copy: an array, or a random generator."""
        return shared.container.storage[0]

    def store_value(self, shared: SharedVariable, value: Any) -> None:
        """Set a shared variable's value, without a copy where the type allows it."""
        if isinstance(value, np.ndarray):
            shared.container.value = value
        else:  # the type's filter might copy an array of a device to host memory
            shared.container.storage[0] = value

    @abstractmethod
    def is_generator(self, shared: SharedVariable) -> bool:
        """Whether a shared variable holds the state of a random number generator."""

    @abstractmethod
    def check_generator(self, shared: SharedVariable, generator: Any, must_jump: bool) -> None:
        """Raise TypeError or ValueError if a variable can't hold a generator, or if it has to jump and can't."""

    def copy_generator(self, shared: SharedVariable) -> Any:
        """Return a copy of a random generator at its current position in the stream."""
        return copy.deepcopy(self.borrow_value(shared))

    def track_generators(self, function: CompiledFunction) -> None:  # noqa: B027 - Theano's are shared
        """Record the generators in a function that the user compiled, for `copy_generator` and `set_generator`."""

    def set_generator(self, shared: SharedVariable, generator: Any) -> None:
        """Set a random generator's state."""
        self.store_value(shared, generator)

    @abstractmethod
    def jump_generator(self, generator: Any, n_jumps: int) -> Any:
        """Return a generator that is ``n_jumps`` jumps ahead.  Streams that are a jump apart do not overlap.

        A jump (NumPy's ``jumped``) is 2**127 draws long for PCG64, and 2**128 for MT19937 and Philox.
        """
