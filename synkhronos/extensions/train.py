"""One callable that takes a training step.

`make_train_function`
    A step on all ranks at once.
`TrainFunction`
    What it makes.
`make_train_function_serial`
    The same step in one process, with the plain graph library.
`SerialTrainFunction`
    What that makes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

import synkhronos as synk
from synkhronos import ranks
from synkhronos.collectives.arguments import mirrored
from synkhronos.collectives.commands import Reduce
from synkhronos.extensions.step import Step
from synkhronos.extensions.updates import RuleUpdates
from synkhronos.function.call import Call
from synkhronos.graphs import library_of

#: An array or Data object for one variable, a list of them for a list of variables.
Rows = npt.ArrayLike | synk.Data | Sequence[npt.ArrayLike | synk.Data]

#: What takes a loss, parameters and hyperparameters, `weight` among them.
Rule = Callable[..., RuleUpdates]

#: Which rows of the data a step uses.
Batch = int | slice | Sequence[int] | npt.NDArray[Any] | None


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

    def __init__(self, model: _Model):
        expression = model.rule.grad_updates[model.rule.grad_shared]
        self.grad_shared = model.rule.grad_shared
        inputs = [*model.x, *model.y]
        self.gradient = synk.function(
            [] if model.held else inputs,
            (model.loss, "mean"),
            # Slices may differ in their number of rows: their weighted gradients add up.
            updates=[(self.grad_shared, expression, "sum")],
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


class SerialTrainFunction:
    """A training step in one process; made by `make_train_function_serial`.

    Attributes
    ----------
    gradient, update : functions of the graph library
        Compute the loss and write the gradient into `grad_shared`, and move the parameters by it.
    grad_shared : shared variable
        The gradients of all parameters in one vector, and how many rows they are from.
    """

    def __init__(self, model: _Model):
        library = library_of(model.loss)
        self.grad_shared = model.rule.grad_shared
        self.gradient = library.function(
            [*model.x, *model.y], model.loss, updates=model.rule.grad_updates, name="train_gradient"
        )
        self.update = library.function([], updates=model.rule.param_updates, name="train_update")
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
        x_data, y_data : array_like, or list of these
            One for each variable of `x` and of `y`; a list where those were lists.  Left out where the data are in
            `sliceable_shareds`.
        batch : int, slice, list of int, or array of int or bool, optional
            Which rows to use: the first that many, a slice, indexes, or a mask.  By default all.
        num_slices : int, optional
            In how many pieces to compute the rows, to save memory.
        batch_s : slice or list of int, optional
            Which rows of the `sliceable_shareds` to use.  By default all.

        Returns
        -------
        ndarray
            The loss before the step: the mean over all rows of the batch.

        Raises
        ------
        TypeError, ValueError, IndexError
            If an argument is wrong; the message names it.
        """
        if isinstance(num_slices, bool) or not isinstance(num_slices, int | np.integer):
            raise TypeError(f"num_slices: expected an integer, got {num_slices!r}")
        if num_slices < 1:
            raise ValueError(f"num_slices: expected at least 1, got {num_slices}")
        arrays = self._model.arrays(x_data, y_data, batch, batch_s)
        data, chooser, chosen = "x_data, y_data", "batch", batch
        if self._model.held:
            data, chooser, chosen = "sliceable_shareds", "batch_s", batch_s
            arrays = [shared.get_value(borrow=True) for shared in self._model.held]
            if isinstance(chosen, int | np.integer) or isinstance(chosen, np.ndarray) and chosen.dtype == bool:
                raise TypeError(f"batch_s: expected a slice or a list of indexes, got {chosen!r}")
        arrays = [_take(np.asarray(a), chosen, chooser) for a in arrays]
        lengths = [len(a) for a in arrays]
        if len(set(lengths)) > 1:
            raise ValueError(f"{data}: expected the same number of rows of each, got {lengths}")
        if lengths[0] == 0:
            raise ValueError(f"{chooser}: expected at least one row, got {chosen!r}")
        if num_slices == 1:
            loss = self.gradient(*arrays)
        else:
            loss = self._in_slices(arrays, min(num_slices, lengths[0]))
        self.update()
        return loss

    def _in_slices(self, arrays: list[np.ndarray], num_slices: int) -> Any:
        """Sum the weighted gradients of slices; return the mean loss."""
        losses, rows, gradients = [], [], []
        for pieces in zip(*(np.array_split(a, num_slices) for a in arrays), strict=True):
            losses.append(self.gradient(*pieces))
            rows.append(len(pieces[0]))
            gradients.append(self.grad_shared.get_value())
        self.grad_shared.set_value(np.sum(gradients, axis=0))
        return np.asarray(np.average(losses, weights=rows), dtype=losses[0].dtype)


def make_train_function(
    loss: Any,
    params: Sequence[Any],
    x: Any,
    y: Any,
    update_rule: Rule,
    sliceable_shareds: Sequence[Any] | None = None,
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
    return TrainFunction(_Model.build(loss, params, x, y, update_rule, sliceable_shareds, rule_kwargs))


def make_train_function_serial(
    loss: Any,
    params: Sequence[Any],
    x: Any,
    y: Any,
    update_rule: Rule,
    sliceable_shareds: Sequence[Any] | None = None,
    **rule_kwargs: Any,
) -> SerialTrainFunction:
    """Make a function that takes a training step in this process alone, without Synkhronos.

    It computes what `make_train_function` computes, and needs no `synkhronos.fork`: to compare with, or to
    debug.

    Parameters
    ----------
    loss, params, x, y, update_rule, sliceable_shareds, **rule_kwargs
        As for `make_train_function`.

    Returns
    -------
    SerialTrainFunction
        To be called as ``train(x_data, y_data, batch=None, num_slices=1)``, or with `sliceable_shareds` as
        ``train(batch_s=None, num_slices=1)``; returns the loss.

    Raises
    ------
    TypeError, ValueError
        If an argument is wrong; the message names it.

    Examples
    --------
    >>> import numpy as np
    >>> import pytensor, pytensor.tensor as pt
    >>> from synkhronos.extensions.updates import sgd
    >>> x, y = pt.matrix("x"), pt.vector("y")
    >>> w = pytensor.shared(np.zeros(2), name="w")
    >>> train = make_train_function_serial(((x @ w - y) ** 2).mean(), [w], x, y, sgd, learning_rate=0.5)
    >>> print(train(np.eye(2), np.array([1.0, 2.0])))
    2.5
    >>> print(w.get_value())
    [0.5 1. ]
    """
    return SerialTrainFunction(_Model.build(loss, params, x, y, update_rule, sliceable_shareds, rule_kwargs))


@dataclass(frozen=True)
class _Model:
    """What to train, and by which rule; `held` are the shared variables that the data are in, if they are."""

    loss: Any
    x: list[Any]
    y: list[Any]
    x_is_list: bool
    y_is_list: bool
    held: list[Any]
    rule: RuleUpdates

    @classmethod
    def build(
        cls,
        loss: Any,
        params: Sequence[Any],
        x: Any,
        y: Any,
        update_rule: Rule,
        sliceable_shareds: Sequence[Any] | None,
        rule_kwargs: dict[str, Any],
    ) -> _Model:
        """Check the arguments, and apply the rule."""
        if isinstance(loss, list | tuple):
            raise TypeError("loss: expected a symbolic scalar, got a list")
        if not callable(update_rule):
            raise TypeError(
                "update_rule: expected a rule of synkhronos.extensions.updates, "
                f"got {update_rule!r} of type {type(update_rule).__name__}"
            )
        if "weight" in rule_kwargs:
            raise TypeError("weight: a training function sets it to the number of rows; got another")
        xs, ys = _variables("x", x), _variables("y", y)
        if not xs:
            raise ValueError("x: expected at least one variable, got none")
        held = _held(sliceable_shareds, [*xs, *ys])
        rule = update_rule(loss, params, weight=xs[0].shape[0], **rule_kwargs)
        if not isinstance(rule, tuple) or len(rule) != 3:
            raise TypeError(
                "update_rule: expected it to return (grad_updates, param_updates, grad_shared), "
                f"got {rule!r} of type {type(rule).__name__}"
            )
        lists = isinstance(x, list | tuple), isinstance(y, list | tuple)
        return cls(loss, xs, ys, *lists, held, RuleUpdates(*rule))

    def arrays(self, x_data: Rows | None, y_data: Rows | None, batch: Any, batch_s: Any) -> list[Any]:
        """One array or Data object for each variable; none where the data are held."""
        if self.held:
            if x_data is not None or y_data is not None or batch is not None:
                raise TypeError("the data are in sliceable_shareds: expected batch_s alone to say which rows")
            return []
        if batch_s is not None:
            raise TypeError("batch_s: this function was made without sliceable_shareds; rows are chosen by batch")
        if x_data is None or y_data is None:
            raise TypeError(f"{'x_data' if x_data is None else 'y_data'}: expected rows, got None")
        return [
            *_listed("x_data", x_data, self.x, self.x_is_list),
            *_listed("y_data", y_data, self.y, self.y_is_list),
        ]


def _variables(argument: str, value: Any) -> list[Any]:
    variables = list(value) if isinstance(value, list | tuple) else [value]
    for i, variable in enumerate(variables):
        expected = f"{argument}: expected a variable or a list of variables"
        try:
            library_of(variable)
        except TypeError as error:
            raise TypeError(f"{expected}; {error}") from None
        if not getattr(variable, "ndim", 0):
            raise ValueError(f"{expected} with rows to scatter, got {variable!r} of {variable.type} at index {i}")
    return variables


def _held(shareds: Sequence[Any] | None, variables: list[Any]) -> list[Any]:
    """Check that there is one shared variable for each input."""
    if shareds is None:
        return []
    if not isinstance(shareds, list | tuple):
        raise TypeError(f"sliceable_shareds: expected a list of shared variables, got {shareds!r}")
    held = list(shareds)
    if len(held) != len(variables):
        raise ValueError(
            f"sliceable_shareds: expected {len(variables)} shared variables, one for each of x and y, got {len(held)}"
        )
    for shared, variable in zip(held, variables, strict=True):
        if not hasattr(shared, "get_value"):
            raise TypeError(f"sliceable_shareds: expected shared variables, got {shared!r}")
        kinds = [(getattr(v.type, "dtype", None), getattr(v.type, "ndim", None)) for v in (shared, variable)]
        if kinds[0] != kinds[1]:
            raise TypeError(
                f"sliceable_shareds: {shared.name!r} of {shared.type} can't stand for {variable!r} of {variable.type}"
            )
    return held


def _listed(argument: str, value: Any, variables: list[Any], is_list: bool) -> list[Any]:
    if not is_list:
        return [value]
    if not isinstance(value, list | tuple):
        raise TypeError(f"{argument}: expected a list of {len(variables)} arrays, got {type(value).__name__}")
    if len(value) != len(variables):
        raise ValueError(f"{argument}: expected a list of {len(variables)} arrays, got {len(value)}")
    return list(value)


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


def _take(array: np.ndarray, batch: Any, name: str) -> np.ndarray:
    """Pick the rows of a batch, as `synkhronos.Function` does; ``name`` is for errors."""
    if batch is None or isinstance(batch, slice):
        return array[batch] if batch is not None else array
    if isinstance(batch, bool):
        raise TypeError(f"{name}: expected a number of rows, a slice, a list of indexes or a mask, got {batch!r}")
    if isinstance(batch, int | np.integer):
        if not 0 <= batch <= len(array):
            raise IndexError(f"{name}: expected a number of rows from 0 to {len(array)}, got {batch}")
        return array[:batch]
    try:
        return array[np.asarray(batch, dtype=None if len(batch) else int)]
    except IndexError as error:
        raise IndexError(f"{name}: {error}") from None
