"""One callable that takes a training step.

`make_train_function`
    A step on all ranks at once.
`TrainFunction`
    What it makes.
`make_train_function_serial`, `SerialTrainFunction`
    The same step in one process, with the plain graph library.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import synkhronos as synk
from synkhronos import ranks
from synkhronos.collectives.arguments import mirrored
from synkhronos.collectives.commands import Reduce
from synkhronos.extensions.model import Batch, Model, Rows, Rule, Updates, is_averaged
from synkhronos.extensions.serial import SerialTrainFunction, make_train_function_serial
from synkhronos.extensions.step import Step
from synkhronos.function.call import Call
from synkhronos.graphs import library_of

__all__ = ["SerialTrainFunction", "TrainFunction", "make_train_function", "make_train_function_serial"]


class TrainFunction:
    """A training step on all ranks; made by `make_train_function`.

    Attributes
    ----------
    gradient : synkhronos.Function
        Computes the loss, and writes each rank's gradient into `grad_shared`.
    update : synkhronos.Function
        Moves the parameters by what is in `grad_shared`.
    grad_shared : shared variable
        The gradients of all parameters in one vector, and how many rows they are from.  After a step it holds
        the ranks' combination.
    """

    def __init__(self, model: Model):
        expression = model.rule.grad_updates[model.rule.grad_shared]
        self.grad_shared = model.rule.grad_shared
        inputs = [*model.x, *model.y]
        self.gradient = synk.function(
            [] if model.held else inputs,
            (model.loss, "mean"),
            # Slices may differ in their number of rows: their weighted gradients add up.
            updates=[
                (self.grad_shared, expression, "sum"),
                *((shared, new, "mean" if is_averaged(shared) else None) for shared, new in model.extra_updates),
            ],
            givens=list(zip(inputs, model.held, strict=False)),
            sliceable_shareds=model.held,
            name="train_gradient",
        )
        self.update = synk.function([], updates=model.rule.param_updates, name="train_update")
        zeros = library_of(self.grad_shared).tensor.zeros_like(self.grad_shared)
        self._clear = synk.function([], updates=[(self.grad_shared, zeros)], name="train_clear")
        self._model = model

    def __call__(
        self,
        x_data: Rows | None = None,
        y_data: Rows | None = None,
        batch: Batch = None,
        num_slices: int = 1,
        batch_s: Any = None,
    ) -> Any:
        """Take one step.

        Parameters
        ----------
        x_data, y_data : Data or array_like, or list of these
            One for each variable of `x` and of `y`; a list where those were lists.  Data are not copied.  Left out
            where the data are in `sliceable_shareds`.
        batch : int, slice, list of int, or array of int or bool, optional
            Which rows to use: the first that many, a slice, indexes, or a mask.  By default all.
        num_slices : int, optional
            In how many pieces each rank computes its rows, to save memory.
        batch_s : slice or list of int, or a list of these, one a rank, optional
            Which rows of its own `sliceable_shareds` each rank uses.  By default all.

        Returns
        -------
        ndarray
            The loss before the step: the mean over all rows of the batch.

        Raises
        ------
        TypeError, ValueError, IndexError
            If an argument is wrong; the message names it.
        WorkerError
            If a worker raised an exception, or died.

        Notes
        -----
        Exact, to rounding, for any number of ranks, rows and slices.
        """
        arrays = self._model.arrays(x_data, y_data, batch, batch_s)
        if not self._model.held and _count(batch, arrays) == 0:
            raise ValueError(f"batch: expected at least one row, got {batch!r}")
        session = ranks.session()
        with session.turn:
            session.settle()
            gradient = self.gradient.prepare(session, arrays, {}, batch, batch_s, num_slices, None)
            if self._some_have_no_rows(gradient, session.size):
                # They sit out, and would contribute what is left of an earlier step.
                self._clear()
            update = self.update.prepare(session, (), {}, None, None, 1, None)
            reduce = Reduce(mirrored(session, [self.grad_shared]), "avg", "everywhere", nccl=True)
            loss, updated = session.run(Step(gradient, reduce, update))
            self.update.results(session, update, updated)
            return self.gradient.results(session, gradient, loss)

    def _some_have_no_rows(self, gradient: Call, n_ranks: int) -> bool:
        """Whether a rank has no rows to compute; refuse to take a step if none has any."""
        if gradient.n_rows is not None:
            return gradient.n_rows < n_ranks
        chosen = gradient.chosen or (slice(None),) * n_ranks
        lengths = [0] * n_ranks
        if any(isinstance(one, slice) for one in chosen):  # of how many rows only the ranks know
            lengths = [min(each) for each in zip(*synk.get_lengths(self._model.held), strict=True)]
        counts = [
            len(range(length)[one]) if isinstance(one, slice) else one.shape[0]
            for one, length in zip(chosen, lengths, strict=True)
        ]
        if not any(counts):
            raise ValueError("batch_s: expected at least one row on some rank, got none")
        return not all(counts)


def make_train_function(
    loss: Any,
    params: Sequence[Any],
    x: Any,
    y: Any,
    update_rule: Rule,
    sliceable_shareds: Sequence[Any] | None = None,
    extra_updates: Updates | None = None,
    **rule_kwargs: Any,
) -> TrainFunction:
    """Make a function that takes a training step on all ranks.

    Call `synkhronos.fork` first.

    Parameters
    ----------
    loss : scalar variable
        What to lower: a mean over the rows of `x`.  What does not depend on the rows may be added to it.
    params : list of shared variables
        The parameters.
    x, y : variable or list of variables
        Inputs and targets, whose rows are scattered over the ranks.  A list of targets may be empty.
    update_rule : callable
        One of `synkhronos.extensions.updates`, or what takes and returns the same.
    sliceable_shareds : list of shared variables, optional
        Where the data are if the ranks hold them already, each its own rows, from `synkhronos.scatter` on: one
        variable for each of `x` and `y`, of the same type.  On a rank all of them have equally many rows.
    extra_updates : dict or list of (shared variable, expression), optional
        What else a step updates on each rank, from that rank's own rows of `x` and `y`: running averages, say.  A rank
        without rows updates none.  Slices' values are averaged, each as often as it has rows, and of integers the last
        slice's stays.  The parameters' updates come after them; if a step fails in between they stay, and the error
        does not say so, except where a step is one launch.
    **rule_kwargs
        For the rule, such as ``learning_rate=0.1``.

    Returns
    -------
    TrainFunction
        To be called as ``train(x_data, y_data, batch=None, num_slices=1)``, or with `sliceable_shareds` as
        ``train(batch_s=None, num_slices=1)``; returns the loss.

    Raises
    ------
    TypeError, ValueError
        If an argument is wrong; the message names it.

    Notes
    -----
    Each step computes gradients on all ranks, combines them in one all-reduce, and updates the parameters on
    all ranks.  Each rank's gradient counts as many times as the rank has rows.

    Examples
    --------
    >>> import numpy as np
    >>> import pytensor, pytensor.tensor as pt
    >>> import synkhronos as synk
    >>> from synkhronos.extensions.updates import adam
    >>> x, y = pt.matrix("x"), pt.vector("y")
    >>> w = pytensor.shared(np.zeros(3), name="w")
    >>> loss = ((x @ w - y) ** 2).mean()
    >>> n = synk.fork(2, use_gpu=False)
    >>> train = make_train_function(loss, [w], x, y, adam, learning_rate=0.1)
    >>> x_data, y_data = synk.data(np.eye(3)), synk.data(np.array([1.0, 2.0, 3.0]))
    >>> for step in range(500):
    ...     value = train(x_data, y_data)
    >>> print(w.get_value().round(3))
    [1. 2. 3.]
    >>> synk.close()
    """
    return TrainFunction(Model.build(loss, params, x, y, update_rule, sliceable_shareds, extra_updates, rule_kwargs))


def _count(batch: Any, arrays: list[Any]) -> int:
    """Count the rows of a batch; whether the data has so many, the gradient function itself checks."""
    if isinstance(batch, int | np.integer):
        return int(batch)
    if batch is not None and not isinstance(batch, slice):
        index = np.asarray(batch)
        return int(np.count_nonzero(index) if index.dtype == bool else index.size)
    with_rows = [a for a in arrays if np.ndim(a)]
    whole = [np.shape(a)[0] for a in with_rows if not getattr(a, "minibatch", False)]
    if batch is None:
        return min(whole or [len(a) for a in with_rows], default=1)
    # Rows of a minibatch are numbered as in the whole data, whose length the minibatch doesn't tell.
    return len(range(min(whole or [batch.stop or 1]))[batch])
