"""Extra updates: updates in a training step besides the update rule's, such as running averages.

Their op is "mean", which averages the new values over ranks, or None: each rank keeps its own value.  If no op is
given, an analysis of the graph decides whether ranks may compute different values.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from synkhronos.graph_libraries import get_library
from synkhronos.graph_libraries.dependence_analysis import DependenceAnalysis
from synkhronos.training.updates import RuleUpdates
from synkhronos.training.updates.shared_variables import get_shape
from synkhronos.variable_types import SharedVariable, Variable

#: Argument for extra updates: shared variables and their new values, each with or without an op.
UpdatesArgument = (
    Mapping[SharedVariable, Variable]
    | Sequence[tuple[SharedVariable, Variable] | tuple[SharedVariable, Variable, str | None]]
)


class ExtraUpdate(NamedTuple):
    """An update in a training step besides the update rule's.

    With the op "mean", ranks average the new values by rows; with None, each rank has its own.  With ``may_differ``,
    ranks may compute different new values in one step, even if their variables are equal before it.
    """

    shared: SharedVariable
    expression: Variable
    op: str | None
    may_differ: bool

    @property
    def slice_op(self) -> str | None:
        """Reduction of the new values over slices: "mean" for floats and complex numbers, else None."""
        has_mean = hasattr(self.shared.type, "dtype") and np.dtype(self.shared.type.dtype).kind not in "biu"
        return "mean" if has_mean else None


def parse_extra_updates(
    updates: UpdatesArgument | None, rule_updates: RuleUpdates, inputs: list[Variable]
) -> list[ExtraUpdate]:
    """Check extra updates, and choose the ops that are not given; rows of ``inputs`` differ between ranks."""
    if updates is None:
        return []
    if not isinstance(updates, Mapping | list | tuple):
        raise TypeError(f"extra_updates: expected a dict or a list of pairs, got {updates!r}")
    entries = list(updates.items() if isinstance(updates, Mapping) else updates)
    rule_ids = {id(shared) for shared in (*dict(rule_updates.grad_updates), *dict(rule_updates.param_updates))}
    updated_ids: set[int] = set()
    for entry in entries:
        if not isinstance(entry, list | tuple) or len(entry) not in (2, 3):
            raise TypeError(
                f"extra_updates: expected pairs of a shared variable and an expression, or with an op, got {entry!r}"
            )
        shared = entry[0]
        if not hasattr(shared, "get_value"):
            raise TypeError(f"extra_updates: expected shared variables, got {shared!r}")
        if hasattr(entry[1], "owner") and getattr(entry[1], "ndim", None) != getattr(shared, "ndim", None):
            raise TypeError(f"extra_updates: {shared.name!r} of type {shared.type} can't take {entry[1]!r}")
        if id(shared) in rule_ids:
            raise ValueError(f"extra_updates: the update rule has an update of {shared.name!r} already")
        if id(shared) in updated_ids:
            raise ValueError(f"extra_updates: there are two for {shared.name!r}")
        updated_ids.add(id(shared))
        if len(entry) == 3 and entry[2] not in ("mean", None):
            raise ValueError(f"extra_updates: {shared.name!r}: expected the op 'mean' or None, got {entry[2]!r}")
        if entry[2:] == ("mean",) and not _is_float(shared):
            raise TypeError(f"extra_updates: {shared.name!r}: op 'mean' needs a variable of floats, got {shared.type}")
    return _choose_ops(entries, inputs)


def _choose_ops(entries: list[Any], inputs: list[Variable]) -> list[ExtraUpdate]:
    """Return extra updates with ops: by default "mean" for floats, and None for all other variables.

    The values of a variable with the op None may diverge between ranks, and so may expressions that read it.  Therefore
    the analysis is repeated with these variables as sources, until it finds no more of them.
    """
    expressions = [entry[1] for entry in entries if hasattr(entry[1], "owner")]
    if not expressions:
        return [ExtraUpdate(entry[0], entry[1], entry[2] if len(entry) == 3 else None, False) for entry in entries]
    library = get_library(*expressions)
    random = [shared for shared in library.find_shareds(expressions) if library.is_generator(shared)]
    differing_variables = [*inputs, *random]
    while True:
        dependence = DependenceAnalysis(library, expressions, differing_variables)
        extra_updates = []
        for shared, expression, *op in entries:
            may_differ = bool(hasattr(expression, "owner") and dependence.list_source_names(expression))
            if not op:
                if may_differ and not _is_float(shared) and not library.is_generator(shared):
                    raise TypeError(
                        f"extra_updates: {shared.name!r} of {shared.type} has no mean, and ranks compute different "
                        "values: give (variable, expression, None) to let each rank keep its own"
                    )
                op = ["mean" if _is_float(shared) else None]
            extra_updates.append(ExtraUpdate(shared, expression, op[0], may_differ))
        # Expressions that read these variables may differ between ranks as well.
        new_differing_variables = [
            u.shared
            for u in extra_updates
            if u.may_differ and u.op is None and not any(u.shared is d for d in differing_variables)
        ]
        if not new_differing_variables:
            return extra_updates
        differing_variables += new_differing_variables


def _is_float(shared: SharedVariable) -> bool:
    """Whether a variable is an array of real floats."""
    return hasattr(shared.type, "dtype") and np.dtype(shared.type.dtype).kind == "f"


def append_averaged_updates(
    rule_updates: RuleUpdates, extra_updates: Sequence[ExtraUpdate], x: Any
) -> tuple[RuleUpdates, int]:
    """Append the averaged extra updates to the vector of gradients, so that one all-reduce suffices::

        [weight x gradients | weight | rows x new values | rows]

    Return the updates, whose expressions read the averages, and the number of items after the gradients.
    """
    averaged = [u for u in extra_updates if u.op == "mean" and u.may_differ]
    if not averaged:
        return rule_updates, 1
    library, gradients = get_library(rule_updates.grad_shared), rule_updates.grad_shared
    tensor = library.tensor
    (size,) = get_shape(gradients)
    dtype = str(np.result_type(gradients.dtype, *(u.shared.dtype for u in averaged)))
    rows = tensor.cast(x.shape[0], dtype)
    pieces, new_values, end = [tensor.cast(rule_updates.grad_updates[gradients], dtype)], {}, size
    shapes = [get_shape(u.shared) for u in averaged]
    total = size + sum(int(np.prod(shape)) for shape in shapes) + 1
    vector = library.shared(np.zeros(total, dtype), name="grad_shared")
    for u, shape in zip(averaged, shapes, strict=True):
        start, end = end, end + int(np.prod(shape))
        pieces.append(rows * tensor.cast(u.expression, dtype).reshape((end - start,)))
        # Adding zeros gives the variable's own type, in which a length of 1 need not be a static (broadcastable) one.
        new = (vector[start:end] / vector[-1]).reshape(shape) + tensor.zeros_like(u.shared)
        new_values[u.shared] = library.convert_to_type_of(u.shared, tensor.cast(new, u.shared.dtype))
    pieces.append(rows.reshape((1,)))
    first = library.convert_to_type_of(gradients, tensor.cast(vector[:size], gradients.dtype))
    values = library.clone(list(rule_updates.param_updates.values()), {gradients: first, **new_values})
    updates = OrderedDict(zip(rule_updates.param_updates, values, strict=True))
    updates.update(new_values)
    return RuleUpdates(OrderedDict({vector: tensor.concatenate(pieces)}), updates, vector), total - size + 1
