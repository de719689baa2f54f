"""Master weights: float32 copies of float16 parameters, which an update rule updates instead."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import numpy as np

from synkhronos.graph_libraries import get_library
from synkhronos.training.updates.arguments import as_gradients, parse_params
from synkhronos.training.updates.shared_variables import make_shared_like, make_zero_state
from synkhronos.training.updates.update_rule import RuleUpdates, UpdateRule
from synkhronos.variable_types import Scalar, SharedVariable, Variables


def master_weights(update_rule: UpdateRule) -> Any:
    r"""Let an update rule compute in float32 for float16 parameters, like the mixed precision of PyTorch and Apex.

    Each float16 parameter has a master copy in float32 among the variables of the rule.  The rule updates the copy, and
    the parameter is the rounded copy.  Steps that are too small for float16 therefore accumulate.

    Parameters
    ----------
    update_rule : callable
        An update rule.

    Notes
    -----
    The variables of the rule also have the value of the parameter after the last step.  If the parameter has another
    value, because the user or an exchange of parameters has set it, a step starts from this value instead of the copy.

    Examples
    --------
    >>> import numpy as np, pytensor
    >>> from synkhronos.training.updates import master_weights, sgd
    >>> w = pytensor.shared(np.float16(1), "w")
    >>> updates = master_weights(sgd)(w, [w], learning_rate=0.0002)
    >>> [(shared.name, shared.dtype) for shared in updates.param_updates]
    [('w', 'float16'), ('w_last', 'float16'), ('w_master', 'float32')]
    >>> for _ in range(10):
    ...     _ = pytensor.function([], updates=updates.grad_updates)()
    ...     _ = pytensor.function([], updates=updates.param_updates)()
    >>> print(w.get_value())
    0.998
    """
    if not callable(update_rule):
        raise TypeError(f"master_weights: expected an update rule, got {update_rule!r}")

    def update_masters(
        loss_or_grads: Variables,
        params: Iterable[SharedVariable],
        *args: Any,
        weight: Scalar | None = None,
        **kwargs: Any,
    ) -> Any:
        params = parse_params(params)
        grads = as_gradients(loss_or_grads, params)
        library = get_library(*params)
        tensor = library.tensor
        # While the rule is built, masters have the parameters' names, which predicates of parameters may read.
        masters = [make_shared_like(p, p.get_value(), "float32", p.name) if p.dtype == "float16" else p for p in params]
        grads = [tensor.cast(g, str(np.result_type(g.dtype, m.dtype))) for g, m in zip(grads, masters, strict=True)]
        updates = RuleUpdates(*update_rule(grads, masters, *args, weight=weight, **kwargs))
        pairs = {m: p for p, m in zip(params, masters, strict=True) if m is not p}
        if not pairs:
            return updates
        last_values = {m: make_zero_state(p, "last") for m, p in pairs.items()}
        for m, p in pairs.items():
            last_values[m].set_value(p.get_value())
        old_values = {
            m: library.convert_to_type_of(m, tensor.switch(tensor.eq(p, last_values[m]), m, tensor.cast(p, m.dtype)))
            for m, p in pairs.items()
        }
        clones = library.clone(list(updates.param_updates.values()), old_values)
        new_values: OrderedDict[Any, Any] = OrderedDict()
        for shared, new in zip(updates.param_updates, clones, strict=True):
            if shared in pairs:
                param = pairs[shared]
                rounded = library.convert_to_type_of(param, tensor.cast(new, "float16"))
                new_values[param] = new_values[last_values[shared]] = rounded
                shared.name = f"{shared.name or 'param'}_master"
            new_values[shared] = library.convert_to_type_of(shared, new)
        return updates._replace(param_updates=new_values)

    update_masters.__name__ = f"master_weights({getattr(update_rule, '__name__', type(update_rule).__name__)})"
    update_masters.__signature__ = inspect.signature(update_rule)  # type: ignore[attr-defined]
    return update_masters
