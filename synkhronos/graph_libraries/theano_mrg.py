"""Jumps in the streams of Theano's generator MRG31k3p.

It has two recurrences of order 3 modulo primes (L'Ecuyer and Touzin, "Fast combined multiple recursive generators with
multipliers of the form a = 2^q +- 2^r", WSC 2000).  One step of each is a product with its matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from synkhronos.variable_types import SharedVariable

#: Matrix and modulus of both recurrences.
_RECURRENCES = (
    (((0, 2**22, 2**7 + 1), (1, 0, 0), (0, 1, 0)), 2**31 - 1),
    (((2**15, 0, 2**15 + 1), (1, 0, 0), (0, 1, 0)), 2**31 - 21069),
)
#: Number of steps between the streams of two ranks.  In Theano, streams of two random variables are 2**134 steps apart,
#: streams of one variable 2**72.  The period is about 2**185.
_JUMP_STEPS = 2**166


def is_mrg_state(shared: SharedVariable) -> bool:
    """Whether a shared variable holds the state of MRG streams."""
    update = getattr(shared, "default_update", None)
    return update is not None and update.owner is not None and type(update.owner.op).__name__.startswith("mrg_uniform")


def jump_mrg(state: np.ndarray, n_jumps: int) -> np.ndarray:
    """Return MRG states ``n_jumps`` jumps ahead; ``state`` is (streams, 6), of integers, 3 for each recurrence."""
    n_steps = n_jumps * _JUMP_STEPS
    jumped = [
        np.array(_compute_matrix_power(matrix, n_steps, modulus), object) @ values.astype(object).T % modulus
        for (matrix, modulus), values in zip(_RECURRENCES, (state[:, :3], state[:, 3:]), strict=True)
    ]
    return np.concatenate(jumped).T.astype(state.dtype)


def _compute_matrix_power(matrix: Sequence[Sequence[int]], power: int, modulus: int) -> Any:
    """Return a power of a 3 by 3 matrix modulo a prime, computed by repeated squaring in exact integers."""
    result, square = np.array(((1, 0, 0), (0, 1, 0), (0, 0, 1)), object), np.array(matrix, object)
    while power:
        if power & 1:
            result = result @ square % modulus
        square = square @ square % modulus
        power >>= 1
    return result
