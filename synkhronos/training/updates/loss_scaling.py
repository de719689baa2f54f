"""Dynamic loss scaling.

Loss scaling keeps small gradients of float16 parameters from becoming zero.  The loss is multiplied by a scale before
the backward pass, and the gradient is divided by it in float32.  If the reduced gradient has infinity or NaN, all ranks
skip the step and halve the scale; all of them read the same vector::

    loss * scale ──> gradients (float16) ──> / scale (float32) ──> all-reduce ──> all finite? ──> step, or scale / 2
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

from synkhronos.graph_libraries import get_library
from synkhronos.training.updates.arguments import as_gradients, parse_params
from synkhronos.training.updates.update_rule import RuleUpdates
from synkhronos.variable_types import SharedVariable, Variable

#: Name of the scale's variable.
LOSS_SCALE_NAME = "loss_scale"
#: Initial scale: the largest power of two in float16.
_INITIAL_SCALE = 2.0**15
#: Number of successive finite steps after which the scale is doubled.
_GROWTH_STEPS = 2000
#: Largest scale.
_MAX_SCALE = 2.0**24


def compute_gradients_with_loss_scale(
    loss: Variable, params: Sequence[SharedVariable]
) -> tuple[SharedVariable, list[Variable]]:
    """Return a scale, a shared float32 scalar, and the gradients of the scaled loss divided by it.

    The gradients have at least float32, and are infinite or NaN where the scaled gradient overflows.
    """
    params = parse_params(params)
    as_gradients(loss, params)
    library = get_library(*params)
    scale = library.shared(np.asarray(_INITIAL_SCALE, "float32"), name=LOSS_SCALE_NAME)
    grads = as_gradients(loss * library.tensor.cast(scale, loss.dtype), params)
    return scale, [library.tensor.cast(g, str(np.result_type(g.dtype, np.float32))) / scale for g in grads]


def skip_overflows(updates: RuleUpdates, scale: SharedVariable) -> RuleUpdates:
    """Return updates that change nothing but the scale and its counter, unless the reduced gradient is finite."""
    library, vector = get_library(scale), updates.grad_shared
    tensor = library.tensor
    zero, one, two = (np.asarray(value, "float32") for value in (0, 1, 2))
    n_finite_steps = library.shared(zero, name="loss_scale_steps")
    is_finite = tensor.all(tensor.lt(abs(vector), np.asarray(np.inf, vector.dtype)))  # False for NaN
    new_values: OrderedDict[Any, Any] = OrderedDict()
    for shared, new in updates.param_updates.items():
        new_values[shared] = library.convert_to_type_of(shared, tensor.switch(is_finite, new, shared))
    is_due = tensor.ge(n_finite_steps + one, np.asarray(_GROWTH_STEPS, "float32"))
    grown_scale = tensor.switch(is_due, tensor.minimum(two * scale, np.asarray(_MAX_SCALE, "float32")), scale)
    new_values[scale] = tensor.switch(is_finite, grown_scale, tensor.maximum(scale / two, one))
    new_values[n_finite_steps] = tensor.switch(is_finite, tensor.switch(is_due, zero, n_finite_steps + one), zero)
    return updates._replace(param_updates=new_values)
