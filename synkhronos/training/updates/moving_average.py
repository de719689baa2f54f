"""Exponential moving averages of parameters, as additional updates of an update rule."""

from __future__ import annotations

from typing import Any

import numpy as np

from synkhronos.graphs import get_library
from synkhronos.training.updates.flat_gradient import RuleUpdates, as_scalar


def add_moving_averages(updates: RuleUpdates, params: list[Any], decay: float) -> tuple[RuleUpdates, list[Any]]:
    """Add updates that compute moving averages of the parameters; return them, and the averages, in at least float32.

    They are e_t = d e_{t-1} + (1 - d) p_t, from the parameters before the first step, even if they have changed since
    the rule was made.
    """
    library = get_library(*params)
    tensor = library.tensor
    has_begun = library.shared(np.zeros((), "float32"), name="ema_has_begun")
    new_values, averages = updates.param_updates.copy(), []
    for p in params:
        average_type = p.type.clone(dtype=str(np.result_type(p.dtype, np.float32)))
        value = np.asarray(p.get_value(), average_type.dtype)
        average = type(p)(type=average_type, value=value, strict=False, name=f"{p.name or 'param'}_ema")
        before = tensor.switch(tensor.eq(has_begun, 0), tensor.cast(p, average_type.dtype), average)
        new = tensor.cast(updates.param_updates[p], average_type.dtype)
        new_values[average] = as_scalar(decay, average) * before + as_scalar(1 - decay, average) * new
        averages.append(average)
    new_values[has_begun] = tensor.ones_like(has_begun)
    return updates._replace(param_updates=new_values), averages
