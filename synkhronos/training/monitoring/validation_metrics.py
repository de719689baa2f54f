"""Metrics of validation, and the reduction of their values over batches.

A metric over all rows is computed batch by batch.  A mean over rows is reduced by the batches' numbers of rows.  A mean
over other items has a weight, and two outputs that add up over batches and ranks::

    (error, "mean", n_items)  -->  [n_items x error, n_items]  -->  sums  -->  first / second
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from synkhronos.devices.reduce_op import list_metric_ops
from synkhronos.engines.accumulator import Accumulator
from synkhronos.graph_libraries import is_variable
from synkhronos.training.train_function.weighted_mean import make_weighted_outputs, warn_of_varying_denominators
from synkhronos.training.updates.arguments import find_library


class Metric(NamedTuple):
    """Scalar expression, and the op that reduces its values over batches and ranks: one of `list_metric_ops`.

    ``weight`` is the number of items that the expression is a mean over; None for the rows.
    """

    expression: Any
    op: str = "mean"
    weight: Any = None

    @property
    def outputs(self) -> list[tuple[Any, str]]:
        """Outputs of a function that computes the metric, with their ops: one, or two for a metric with a weight."""
        if self.weight is None:
            return [(self.expression, self.op)]
        return make_weighted_outputs(self.expression, self.weight)


def parse_metrics(validate: Any, inputs: Sequence[Any]) -> dict[str, Metric]:
    """Return the metrics of the argument `validate` by name: ``valid_0`` and so on for those without one."""
    if validate is None:
        return {}
    if isinstance(validate, Mapping):
        entries_by_name = dict(validate)
    else:
        is_list = isinstance(validate, list) or isinstance(validate, tuple) and not _is_metric_with_op(validate)
        entries_by_name = {f"valid_{i}": entry for i, entry in enumerate(validate if is_list else [validate])}
    metrics = {name: _parse_metric(name, entry) for name, entry in entries_by_name.items()}
    row_means = {name: m.expression for name, m in metrics.items() if m.op == "mean" and m.weight is None}
    warn_of_varying_denominators({f"validate: {name}": mean for name, mean in row_means.items()}, inputs)
    return metrics


def _is_metric_with_op(entry: tuple[Any, ...]) -> bool:
    """Whether a tuple is one entry, a variable with its op."""
    return len(entry) in (2, 3) and not is_variable(entry[1])


def _parse_metric(name: str, entry: Any) -> Metric:
    """Return the metric of an entry.  Raise TypeError or ValueError if it is not valid."""
    expected = f"validate: {name}: expected a scalar variable, or (variable, op), or (variable, 'mean', weight)"
    parts = entry if isinstance(entry, list | tuple) else (entry,)
    if not 1 <= len(parts) <= 3:
        raise TypeError(f"{expected}, got {entry!r}")
    metric = Metric(*parts)
    if metric.op not in list_metric_ops():
        raise ValueError(f"{expected} with an op of {', '.join(list_metric_ops())}, got {metric.op!r}")
    if metric.weight is not None and metric.op != "mean":
        raise ValueError(f"{expected}; an op {metric.op!r} has no weight")
    variables = [metric.expression] if metric.weight is None else [metric.expression, metric.weight]
    find_library(expected, *variables)
    for variable in variables:
        if getattr(variable, "ndim", None) != 0:
            raise ValueError(f"{expected}, got {variable!r} of {variable.type}")
    return metric


class MetricTotals:
    """Reductions of metrics over batches.  ``rows`` is the number of rows so far.

    After `compute`, ``metrics_of_weight_0`` has the names of means whose weights are all 0.
    """

    metrics_of_weight_0: set[str]

    def __init__(self, metrics: Mapping[str, Metric]):
        self._metrics = metrics
        self._totals = [Accumulator(op) for metric in metrics.values() for _, op in metric.outputs]
        self.rows = 0

    def update(self, values: Sequence[Any], rows: int) -> None:
        """Add the values of all metrics' `Metric.outputs` on a batch.  ``rows`` is the weight of its means."""
        for total, value in zip(self._totals, values, strict=True):
            total.add(np.float64(value), rows)
        self.rows += rows

    def compute(self) -> dict[str, float]:
        """Return each metric's value over all batches, by name.  A mean whose weights are all 0 is NaN."""
        values = iter(float(total.get_result()) for total in self._totals)
        results = {}
        self.metrics_of_weight_0 = set()
        for name, metric in self._metrics.items():
            value = next(values)
            if metric.weight is not None:
                weight = next(values)
                value = value / weight if weight else np.nan
                if not weight:
                    self.metrics_of_weight_0.add(name)
            results[name] = value
        return results
