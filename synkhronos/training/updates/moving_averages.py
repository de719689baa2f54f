"""Moving averages of the parameters, as additional updates of an update rule."""

from __future__ import annotations

import numpy as np

from synkhronos.graph_libraries import get_library
from synkhronos.training.updates.arguments import as_scalar
from synkhronos.training.updates.shared_variables import make_shared_like
from synkhronos.training.updates.update_rule import RuleUpdates
from synkhronos.variable_types import SharedVariable


def add_moving_averages(
    updates: RuleUpdates, params: list[SharedVariable], decay: float
) -> tuple[RuleUpdates, list[SharedVariable]]:
    """Add updates for moving averages of the parameters.  Return all updates, and the averages, in at least float32.

    The averages are e_t = d e_{t-1} + (1 - d) p_t.  They start from the parameters before the first step, even if the
    parameters have changed since the rule was made.
    """
    library = get_library(*params)
    tensor = library.tensor
    has_begun = library.shared(np.zeros((), "float32"), name="ema_has_begun")
    new_values, averages = updates.param_updates.copy(), []
    for p in params:
        dtype = str(np.result_type(p.dtype, np.float32))
        average = make_shared_like(p, p.get_value(), dtype, f"{p.name or 'param'}_ema")
        old_average = tensor.switch(tensor.eq(has_begun, 0), tensor.cast(p, dtype), average)
        new = tensor.cast(updates.param_updates[p], dtype)
        new_values[average] = as_scalar(decay, average) * old_average + as_scalar(1 - decay, average) * new
        averages.append(average)
    new_values[has_begun] = tensor.ones_like(has_begun)
    return updates._replace(param_updates=new_values), averages
