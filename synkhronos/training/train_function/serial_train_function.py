"""Training step in one process with the plain graph library, to compare with or to debug."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from synkhronos.casts import as_numbers
from synkhronos.checks import check_at_least
from synkhronos.data.rows import select_rows
from synkhronos.devices import take_rows
from synkhronos.graphs import SharedVariable, Variable, get_library
from synkhronos.training.train_function.extra_updates import UpdatesArgument
from synkhronos.training.train_function.step_options import StepOptions
from synkhronos.training.train_function.training_graph import (
    BatchArgument,
    DataArgument,
    TrainingGraph,
)
from synkhronos.training.train_function.weighted_mean import divide_by_weight
from synkhronos.training.updates.update_rule import UpdateRule


class SerialTrainFunction:
    """A training step in one process; made by `make_train_function_serial`.

    Attributes
    ----------
    gradient, update : functions of the graph library
        The first computes the loss and writes the gradient into `grad_shared`; the second updates the parameters.
    grad_shared : shared variable
        The gradients of all parameters in one vector, and the number of their rows.
    optimizer_state : list of shared variables
        The rule's state, in the order of `synkhronos.training.TrainFunction`.
    """

    def __init__(self, graph: TrainingGraph):
        library = get_library(graph.loss)
        self.grad_shared = graph.rule_updates.grad_shared
        self.optimizer_state = graph.optimizer_state
        self.gradient = library.function(
            [*graph.x, *graph.y],
            [graph.loss] if graph.weight is None else [graph.loss, graph.weight],
            updates=[
                *graph.rule_updates.grad_updates.items(),
                *((u.shared, u.expression) for u in graph.extra_updates),
            ],
            name="train_gradient",
        )
        self.update = library.function([], updates=graph.rule_updates.param_updates, name="train_update")
        self._graph = graph

    def get_ema(self) -> list[SharedVariable] | None:
        """Return the moving averages of the parameters, in their order; None without the option `ema`."""
        return self._graph.ema

    def __call__(
        self,
        x_data: DataArgument | None = None,
        y_data: DataArgument | None = None,
        batch: BatchArgument = None,
        num_slices: int | None = None,
        batch_s: Any = None,
    ) -> Any:
        """Take one step.

        Parameters
        ----------
        x_data, y_data, batch, num_slices
            As for `synkhronos.training.TrainFunction`.
        batch_s : slice or list of int, optional
            Rows of the `sliceable_shareds`; default: all.

        Returns
        -------
        ndarray
            The loss before the step: the mean over all rows of the batch.
        """
        num_slices = self._graph.options.num_slices if num_slices is None else num_slices
        num_slices = check_at_least(num_slices, "num_slices", 1)
        arrays = self._graph.check_data(x_data, y_data, batch, batch_s)
        data, chooser, chosen = "x_data, y_data", "batch", batch
        if self._graph.sliceable:
            data, chooser, chosen = "sliceable_shareds", "batch_s", batch_s
            arrays = [shared.get_value(borrow=True) for shared in self._graph.sliceable]
            if isinstance(chosen, int | np.integer) or isinstance(chosen, np.ndarray) and chosen.dtype == bool:
                raise TypeError(f"batch_s: expected a slice or a list of indexes, got {chosen!r}")
        arrays = [as_numbers(a, data) for a in arrays]
        arrays = [take_rows(a, select_rows(chosen, len(a), chooser)) for a in arrays]
        lengths = [len(a) for a in arrays]
        if len(set(lengths)) > 1:
            raise ValueError(f"{data}: expected the same number of rows of each, got {lengths}")
        if lengths[0] == 0:
            raise ValueError(f"{chooser}: expected at least one row, got {chosen!r}")
        if num_slices == 1:
            loss = self.gradient(*arrays)[0]
        else:
            loss = self._compute_in_slices(arrays, min(num_slices, lengths[0]))
        self.update()
        return loss

    def steps(
        self,
        x_data: DataArgument | None = None,
        y_data: DataArgument | None = None,
        batches: Sequence[BatchArgument] | None = None,
        num_slices: int | None = None,
        batches_s: Sequence[Any] | None = None,
    ) -> list[Any]:
        """Take several steps, one by one, and return the loss before each.

        Parameters
        ----------
        x_data, y_data, batches, num_slices, batches_s
            As for `synkhronos.training.TrainFunction.steps`.

        Returns
        -------
        list of ndarray
        """
        _, steps = self._graph.check_steps(x_data, y_data, batches, batches_s)
        return [self(x_data, y_data, batch, num_slices, batch_s) for batch, batch_s in steps]

    def _compute_in_slices(self, arrays: list[np.ndarray], num_slices: int) -> Any:
        """Sum the weighted gradients of slices; return the mean loss."""
        # Each slice starts with the same extra variables; generators advance from slice to slice.
        extra = [u for u in self._graph.extra_updates if hasattr(u.shared.type, "dtype")]
        before = [u.shared.get_value() for u in extra]
        losses, weights, rows, gradients, after = [], [], [], [], []
        for pieces in zip(*(np.array_split(a, num_slices) for a in arrays), strict=True):
            try:
                loss, *weight = self.gradient(*pieces)
                losses.append(loss)
                rows.append(len(pieces[0]))
                weights.append(float(weight[0]) if weight else rows[-1])
                gradients.append(self.grad_shared.get_value())
                after.append([u.shared.get_value() for u in extra])
            finally:
                for u, value in zip(extra, before, strict=True):
                    u.shared.set_value(value)
        self.grad_shared.set_value(np.sum(gradients, axis=0).astype(self.grad_shared.type.dtype, copy=False))
        for u, value, values in zip(extra, before, zip(*after, strict=True), strict=True):
            mean = np.average(values, axis=0, weights=rows).astype(value.dtype) if u.slice_op == "mean" else values[-1]
            u.shared.set_value(mean)
        total = sum(w * loss for w, loss in zip(weights, losses, strict=True) if w)
        return divide_by_weight(total, sum(weights), losses[0].dtype)


def make_train_function_serial(
    loss: Variable,
    params: Sequence[SharedVariable],
    x: Variable | Sequence[Variable],
    y: Variable | Sequence[Variable],
    update_rule: UpdateRule,
    sliceable_shareds: Sequence[SharedVariable] | None = None,
    extra_updates: UpdatesArgument | None = None,
    weight: Variable | None = None,
    clip_norm: float | None = None,
    num_slices: int = 1,
    ema: float | None = None,
    loss_scale: str | None = None,
    **rule_kwargs: Any,
) -> SerialTrainFunction:
    """Make a function that takes a training step in this process alone, without Synkhronos.

    Its results are equal to those of `make_train_function`, but it needs no ranks: for comparisons and debugging.

    Parameters
    ----------
    loss, params, x, y, update_rule, sliceable_shareds, extra_updates, weight, clip_norm, num_slices, ema, loss_scale
        As for `make_train_function`.
    **rule_kwargs
        For the rule.

    Returns
    -------
    SerialTrainFunction
        To be called as ``train(x_data, y_data, batch=None, num_slices=1)``, or with `sliceable_shareds` as
        ``train(batch_s=None, num_slices=1)``; returns the loss.

    Examples
    --------
    >>> import numpy as np
    >>> import pytensor, pytensor.tensor as pt
    >>> from synkhronos.training.updates import sgd
    >>> x, y = pt.matrix("x"), pt.vector("y")
    >>> w = pytensor.shared(np.zeros(2), name="w")
    >>> train = make_train_function_serial(((x @ w - y) ** 2).mean(), [w], x, y, sgd, learning_rate=0.5)
    >>> print(train(np.eye(2), np.array([1.0, 2.0])))
    2.5
    >>> print(w.get_value())
    [0.5 1. ]
    """
    options = StepOptions(clip_norm, num_slices, ema, loss_scale=loss_scale)
    return SerialTrainFunction(
        TrainingGraph.build(
            loss=loss,
            params=params,
            x=x,
            y=y,
            update_rule=update_rule,
            rule_kwargs=rule_kwargs,
            options=options,
            sliceable_shareds=sliceable_shareds,
            extra_updates=extra_updates,
            weight=weight,
            is_serial=True,
        )
    )
