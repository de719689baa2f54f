"""Training step in one process with the plain graph library, to compare with or to debug."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from synkhronos.casts import as_numbers
from synkhronos.data_objects.rows import BatchArgument, select_rows
from synkhronos.devices import take_rows
from synkhronos.graph_libraries import get_library
from synkhronos.training.train_function.extra_updates import UpdatesArgument
from synkhronos.training.train_function.step_options import StepOptions
from synkhronos.training.train_function.training_graph import DataArgument, TrainingGraph
from synkhronos.training.updates.update_rule import UpdateRule
from synkhronos.variable_types import SharedVariable, Variable, Variables


class SerialTrainFunction:
    """A training step in one process; made by `make_train_function_serial`.

    Attributes
    ----------
    gradient, update : functions of the graph library
        The first computes the loss and writes the gradient into `grad_shared`.  The second updates the parameters.
    grad_shared : shared variable
        The gradients of all parameters in one vector, and the number of their rows.
    optimizer_state : list of shared variables
        The update rule's state, in the order of `synkhronos.training.TrainFunction`.
    """

    def __init__(self, graph: TrainingGraph):
        library = get_library(graph.loss)
        self.grad_shared = graph.rule_updates.grad_shared
        self.optimizer_state = graph.optimizer_state
        self.gradient = library.function(
            [*graph.x, *graph.y],
            [graph.loss],
            updates=[
                *graph.rule_updates.grad_updates.items(),
                *((u.shared, u.expression) for u in graph.extra_updates),
            ],
            name="train_gradient",
        )
        self.update = library.function([], updates=graph.rule_updates.param_updates, name="train_update")
        self._graph = graph

    def get_ema(self) -> list[SharedVariable] | None:
        """Return the moving averages of the parameters, in their order, or None without the option `ema`."""
        return self._graph.ema

    def __call__(self, x_data: DataArgument, y_data: DataArgument | None = None, batch: BatchArgument = None) -> Any:
        """Take one step.

        Parameters
        ----------
        x_data, y_data, batch
            As for `synkhronos.training.TrainFunction`.

        Returns
        -------
        ndarray
            The loss before the step: the mean over all rows of the batch.
        """
        arrays = [as_numbers(a, "x_data, y_data") for a in self._graph.parse_data(x_data, y_data, batch, None)]
        arrays = [take_rows(a, select_rows(batch, len(a), "batch")) for a in arrays]
        lengths = [len(a) for a in arrays]
        if len(set(lengths)) > 1:
            raise ValueError(f"x_data, y_data: expected the same number of rows of each, got {lengths}")
        if lengths[0] == 0:
            raise ValueError(f"batch: expected at least one row, got {batch!r}")
        loss = self.gradient(*arrays)[0]
        self.update()
        return loss


def make_train_function_serial(
    loss: Variable,
    params: Sequence[SharedVariable],
    x: Variables,
    y: Variables,
    update_rule: UpdateRule,
    extra_updates: UpdatesArgument | None = None,
    weight: Variable | None = None,
    clip_norm: float | None = None,
    ema: float | None = None,
    loss_scale: str | None = None,
    **update_rule_kwargs: Any,
) -> SerialTrainFunction:
    """Make a function that takes a training step in this process alone, without Synkhronos.

    Its results are equal to those of `make_train_function`, if the loss is a mean over rows as required there, but it
    needs no ranks: for comparisons and debugging.

    Parameters
    ----------
    loss, params, x, y, update_rule, extra_updates, weight, clip_norm, ema, loss_scale
        As for `make_train_function`.
    **update_rule_kwargs
        Options of the update rule.

    Returns
    -------
    SerialTrainFunction
        To be called as ``train(x_data, y_data, batch=None)``; returns the loss.

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
    options = StepOptions(clip_norm, ema=ema, loss_scale=loss_scale)
    graph = TrainingGraph(loss, params, x, y, update_rule, update_rule_kwargs, options, None, extra_updates, weight)
    return SerialTrainFunction(graph)
