"""Data-parallel training step: one callable that trains all ranks on a batch.

The rows of a batch are scattered over the ranks, and the result is that of one process with all rows::

    rank 0   rows --> gradient --> [n x gradients | n] --+                +--> divide by n, apply the rule
    rank 1   rows --> gradient --> [n x gradients | n] --+-> all-reduce --+--> divide by n, apply the rule
    ...

A rank's n is its number of rows, or the value of ``weight``.  As n is part of the vector, one all-reduce gives the
exact mean for any numbers of rows per rank.  New values of extra updates are part of the vector, too, and averaged by
rows.

Several steps can be one launch.  `TrainFunction.take_steps_with_weights` groups the steps (see `launch_groups`).  A
step that cannot be grouped is a launch of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from synkhronos import ranks
from synkhronos.casts import check_cast
from synkhronos.checks import check_list
from synkhronos.collectives.all_reduce_command import AllReduce
from synkhronos.collectives.command_cache import prepare_command
from synkhronos.collectives.commands import GetLayouts
from synkhronos.data_objects.rows import BatchArgument
from synkhronos.devices import NUMPY
from synkhronos.functions import function, get_dispatcher
from synkhronos.functions.call import Call
from synkhronos.graph_libraries import get_library
from synkhronos.replication.replicator import distribute_variables
from synkhronos.training.train_function.extra_updates import UpdatesArgument, append_averaged_updates
from synkhronos.training.train_function.launch_groups import (
    MAX_LAUNCH_NBYTES,
    StepRows,
    assign_rows,
    assign_sliceable_rows,
    group_steps,
)
from synkhronos.training.train_function.optimizer_state import OptimizerState
from synkhronos.training.train_function.step_command import ShardedStepCommand, StepCommand, can_skip_comparisons
from synkhronos.training.train_function.step_options import StepOptions
from synkhronos.training.train_function.training_graph import DataArgument, TrainingGraph
from synkhronos.training.train_function.weighted_mean import divide_by_weight
from synkhronos.training.updates import RuleUpdates
from synkhronos.training.updates.sharded_updates import ShardedUpdates
from synkhronos.training.updates.shared_variables import get_shape
from synkhronos.training.updates.update_rule import UpdateRule, get_update_rule_name
from synkhronos.variable_types import Array, SharedVariable, Variable, Variables

#: Loss of a step as a term of a weighted mean: the loss and None, or the loss times its weight and the weight.
WeightedLoss: TypeAlias = tuple[Array, Array | None]
#: Maximal number of steps with a sharded optimizer in one command.
_MAX_SHARDED_STEPS = 256
#: Minimal number of bytes of scattered rows per step for which each step is a launch.  Such steps take long enough for
#: Python to copy the next rows and launch the next step: ResNet-50 is slower with many steps in a launch.
_LONG_STEP_NBYTES = 4 << 20


class TrainFunction:
    """Training step on all ranks; made by `make_train_function`.

    Attributes
    ----------
    gradient : synkhronos.Function
        Computes the loss, and writes each rank's gradient into `grad_shared`.
    update : synkhronos.Function
        Updates the parameters from `grad_shared`.
    grad_shared : shared variable
        Vector of the gradients of all parameters, with the number of their rows or the sum of weights; after these,
        new values of `extra_updates` that are averaged, and their number of rows.  After a step it holds the reduction
        over ranks.
    optimizer_state : list of shared variables
        State variables of the update rule, such as velocities and counters, to save and load with the parameters.
        Their order depends only on the rule and the parameters.  Their values are equal on all ranks.
    """

    def __init__(self, graph: TrainingGraph, exchange_dtype: str | None = None):
        self._build_functions(graph)
        self._graph = graph
        self._exchange_dtype = exchange_dtype
        self._last_command: StepCommand | None = None

    def _build_functions(self, graph: TrainingGraph) -> None:
        """Make the functions, and the variables of a sharded optimizer, for the present number of ranks."""
        rule_updates, self._n_tail_items = append_averaged_updates(graph.rule_updates, graph.extra_updates, graph.x[0])
        sharded_updates, n_ranks = None, ranks.get_session().size
        if graph.options.shard_optimizer and n_ranks > 1:
            sharded_updates = ShardedUpdates(
                rule_updates, graph.params, n_ranks, get_update_rule_name(graph.update_rule)
            )
            rule_updates = RuleUpdates(
                sharded_updates.grad_updates, sharded_updates.local_updates, sharded_updates.grad_shared
            )
        grad_shared = rule_updates.grad_shared
        inputs = [*graph.x, *graph.y]
        self.gradient = function(
            [] if graph.sliceable else inputs,
            graph.outputs[0] if graph.weight is None else graph.outputs,
            # Slices may have different numbers of rows.  Each gradient is multiplied by its rows, so that they add up.
            updates=[
                (grad_shared, rule_updates.grad_updates[grad_shared], "sum"),
                *(
                    (u.shared, u.expression, u.slice_op)
                    for u in graph.extra_updates
                    if u.shared not in rule_updates.param_updates
                ),
            ],
            givens=list(zip(inputs, graph.sliceable, strict=False)),
            sliceable_shareds=graph.sliceable,
            name="train_gradient",
        )
        self.update = function([], updates=rule_updates.param_updates, name="train_update")
        self._update_functions = [self.update]
        if sharded_updates is not None:
            self._update_functions.append(function([], updates=sharded_updates.whole_updates, name="train_gather"))
        zeros = get_library(grad_shared).tensor.zeros_like(grad_shared)
        self._clear_gradient_function = function([], updates=[(grad_shared, zeros)], name="train_clear")
        # Set after the functions: deepcopy copies attributes in order, and functions have to copy the variables.
        self.grad_shared = grad_shared
        sharded_variables = {} if sharded_updates is None else sharded_updates.sharded_variables
        self._optimizer = OptimizerState(graph.optimizer_state, sharded_variables, n_ranks if sharded_updates else None)
        self.optimizer_state = self._optimizer.variables
        #: Variables of a `ShardedStepCommand`: matrix, row, rank number, shards of the optimizer's state.
        self._sharded_step_variables: list[SharedVariable] = []
        if sharded_updates is not None:
            shards = [variable.shard for variable in sharded_variables.values()]
            self._sharded_step_variables = [grad_shared, sharded_updates.row, sharded_updates.rank_number, *shards]
            self._gathers_gradient = sharded_updates.gathers_gradient

    def gather_state_vector(self, shareds: Sequence[SharedVariable]) -> np.ndarray:
        """Return whole values of variables of the update rule: see `OptimizerState.gather_vector`."""
        return self._optimizer.gather_vector(shareds)

    def set_state_vector(self, shareds: Sequence[SharedVariable], vector: np.ndarray) -> None:
        """Set variables of the update rule from `gather_state_vector`, also if the number of ranks has changed."""
        if self._optimizer.is_sharded and self._optimizer.n_ranks != ranks.get_session().size:
            self._build_functions(self._graph)
        self._optimizer.set_vector(shareds, vector)

    def get_ema(self) -> list[SharedVariable] | None:
        """Return the moving averages of the parameters, in their order, or None without the option `ema`.

        With `shard_optimizer` each rank has a part of the averages.  This method is then a collective: it sets the
        returned variables to the current averages on all ranks.
        """
        self._optimizer.gather_into_whole_variables(self._graph.ema or ())
        return self._graph.ema

    def get_optimizer_state(self) -> list[np.ndarray]:
        """Return the values of the update rule's variables, whole also with `shard_optimizer`.

        Returns
        -------
        list of ndarray
            One for each variable of `optimizer_state`, with the shapes and in the order of a function without
            `shard_optimizer`.
        """
        return self._optimizer.gather_values()

    def set_optimizer_state(self, values: Sequence[Array]) -> None:
        """Set the update rule's variables on all ranks.

        Parameters
        ----------
        values : list of array_like
            As from `get_optimizer_state`, of a function with any number of ranks, with `shard_optimizer` or without.

        Raises
        ------
        TypeError, ValueError
            If the values do not fit the variables.  No variable is changed.
        """
        shareds = self._graph.optimizer_state
        values = check_list(values, "values", len(shareds), "arrays, one for each variable of optimizer_state")
        arrays = []
        for shared, value in zip(shareds, values, strict=True):
            name, dtype, array = shared.name or "a variable", np.dtype(shared.type.dtype), np.asarray(value)
            check_cast(array, dtype, f"values: {name}")
            if array.shape != get_shape(shared):
                raise ValueError(f"values: {name} has shape {get_shape(shared)}, got {array.shape}")
            arrays.append(array.astype(dtype))
        self._optimizer.set_values(arrays)

    def __call__(
        self,
        x_data: DataArgument | None = None,
        y_data: DataArgument | None = None,
        batch: BatchArgument = None,
        num_slices: int | None = None,
        batch_s: Any = None,
    ) -> Array:
        """Take one step.

        Parameters
        ----------
        x_data, y_data : Data or array_like, or list of these
            Rows of the inputs and of the targets.  A list has one entry per variable, if `x` or `y` was a list.  Data
            objects are not copied.  Omit both if the data are in `sliceable_shareds`, and `y_data` if `y` is an empty
            list.
        batch : int, slice, list of int, or array of int or bool, optional
            Selection of rows: the number of first rows, a slice, indexes, or a mask.  Default: all rows.
        num_slices : int, optional
            Number of slices in which each rank computes its rows, to save memory.  Default: that of
            `make_train_function`.
        batch_s : slice or list of int, or a list of these, one for each rank, optional
            Selection of each rank's rows of `sliceable_shareds`.  Default: all rows.

        Returns
        -------
        ndarray
            Loss before the step: its mean over all rows of the batch, or by `weight`.

        Raises
        ------
        TypeError, ValueError, IndexError
            If an argument is wrong; the message names it.
        WorkerError
            If a worker raised an exception, or died.

        Notes
        -----
        The result depends on the numbers of ranks, rows per rank and slices only by rounding.
        """
        num_slices = self._graph.options.num_slices if num_slices is None else num_slices
        arrays = self._graph.parse_data(x_data, y_data, batch, batch_s)
        return self._to_loss(*self._take_step(arrays, batch, batch_s, num_slices))

    def _to_loss(self, value: Array, weight: Array | None) -> Array:
        """Return the loss of a step as an array, from a pair of `take_steps_with_weights`."""
        return value if weight is None else divide_by_weight(value, weight, self._graph.loss.dtype)

    def steps(
        self,
        x_data: DataArgument | None = None,
        y_data: DataArgument | None = None,
        batches: Sequence[BatchArgument] | None = None,
        num_slices: int | None = None,
        batches_s: Sequence[Any] | None = None,
    ) -> list[Array]:
        """Take several steps, in one launch if possible.

        A GPU finishes a step of a small network before Python has launched the next one.  This method launches many
        steps at once: XLA runs them one after another, with an all-reduce of the gradients in each.

        Parameters
        ----------
        x_data, y_data, num_slices
            As for a single step: all the data.  Each step takes a batch of them.
        batches, batches_s : sequence
            The argument `batch` of each step; or `batch_s`, if the data are in `sliceable_shareds`.

        Returns
        -------
        list of ndarray
            Loss before each step.

        Notes
        -----
        The results, and errors, are those of single steps.

        Successive steps share a launch if all of these conditions hold; other steps are taken one by one:

        ================  ==========================================================================================
        Mode              JAX mode on GPUs.  With `shard_optimizer` instead any other mode on CPU cores; the steps then
                          share a command.
        Rows              Each rank has equally many rows in all of these steps.
        Scattered data    All ranks have equally many rows, of less than 4 MiB.  The arrays are of one length, and
                          are not minibatches.
        `batches_s`       Indexes of at least one row for each rank: neither slices nor None.
        `num_slices`      1
        ================  ==========================================================================================

        A launch has at most 256 steps, and at most 1 GiB of scattered rows per rank.  XLA compiles once for each number
        of steps in a launch, and for each number of rows, and caches the 16 programs used last.  So take the same
        number of steps in each call, ten or twenty for instance.

        The rows of all steps are checked before the first step, except the range of indexes in ``batches_s``, which
        only the ranks know.  A later error has a note with the number of steps taken; their losses are lost.  If a rank
        fails in the middle of a launch, some ranks may have taken more of its steps than others: `synkhronos.broadcast`
        makes the parameters equal again.

        Examples
        --------
        >>> import numpy as np
        >>> import pytensor, pytensor.tensor as pt
        >>> import synkhronos as synk
        >>> from synkhronos.training.updates import sgd
        >>> x, y = pt.matrix("x"), pt.vector("y")
        >>> w = pytensor.shared(np.zeros(2), name="w")
        >>> n = synk.fork(2, use_gpu=False)
        >>> train = make_train_function(((x @ w - y) ** 2).mean(), [w], x, y, sgd, learning_rate=0.5)
        >>> losses = train.steps(np.eye(2), np.ones(2), batches=[[0, 1], [1, 0], [0, 1]])
        >>> print(*losses)
        1.0 0.25 0.0625
        >>> synk.close()
        """
        return [
            self._to_loss(*step)
            for step in self.take_steps_with_weights(x_data, y_data, batches, num_slices, batches_s)
        ]

    def take_steps_with_weights(
        self,
        x_data: DataArgument | None,
        y_data: DataArgument | None,
        batches: Any,
        num_slices: int | None = None,
        batches_s: Any = None,
    ) -> list[WeightedLoss]:
        """Take several steps, as `steps` does, and return their losses as terms of a weighted mean.

        Returns
        -------
        list of WeightedLoss
            The loss before each step.
        """
        num_slices = self._graph.options.num_slices if num_slices is None else num_slices
        arrays, steps = self._graph.parse_steps(x_data, y_data, batches, batches_s)
        session, length = ranks.get_session(), _find_common_length(arrays)
        rows: Sequence[StepRows] = [None] * len(steps)
        if self._graph.sliceable:
            rows = assign_sliceable_rows([batch_s for _, batch_s in steps], session.size)
        elif length is not None:
            rows = assign_rows([batch for batch, _ in steps], length, session.size)
        losses: list[WeightedLoss] = []
        try:
            for start, stop in group_steps(rows, self._find_max_steps_per_command(arrays, rows, num_slices)):
                group_losses = self._take_steps_in_one_command(arrays, rows[start:stop])
                if group_losses is not None:
                    losses += group_losses
                    continue
                for batch, batch_s in steps[start:stop]:
                    losses.append(self._take_step(arrays, batch, batch_s, num_slices))
        except BaseException as error:
            if losses:
                error.add_note(f"{len(losses)} of the {len(steps)} steps had been taken before.")
            raise
        return losses

    def _take_step(self, arrays: list[Array], batch: BatchArgument, batch_s: Any, num_slices: int) -> WeightedLoss:
        """Take a step.  Return its loss."""
        losses = self._run_step_command(arrays, batch, batch_s, num_slices)
        assert losses is not None  # every rank can take a single step
        return losses[0]

    def _take_steps_in_one_command(self, arrays: list[Array], rows: Sequence[StepRows]) -> list[WeightedLoss] | None:
        """Take steps in one command.  Return their losses, or None if they have to be taken one by one."""
        if len(rows) == 1:
            return None
        by_rank = [np.concatenate(parts) for parts in zip(*filter(None, rows), strict=True)]
        batch, batch_s = (None, by_rank) if self._graph.sliceable else (np.concatenate(by_rank), None)
        return self._run_step_command(arrays, batch, batch_s, 1, len(rows))

    def _find_max_steps_per_command(self, arrays: list[Array], rows: Sequence[StepRows], num_slices: int) -> int:
        """Return the maximal number of steps in a command, or 1 if steps cannot share one."""
        if isinstance(num_slices, bool) or not isinstance(num_slices, int | np.integer) or num_slices != 1:
            return 1  # a single step also raises the error for an invalid number
        longest = max((len(indexes) for step in rows if step is not None for indexes in step), default=0)
        if not longest:
            return 1  # no step can share a command; the data may not even have shapes
        engine, max_repeats = get_dispatcher(self.gradient).computation.engine, _MAX_SHARDED_STEPS
        if self._sharded_step_variables and engine.device is not NUMPY:
            return 1  # slicing the rows of a step out of an array on a GPU takes longer than a command
        if not self._sharded_step_variables:
            max_repeats = engine.get_max_repeats(np.dtype(self.grad_shared.type.dtype))
        # If the data are in shared variables, a row has no bytes here, since each step takes its rows on the device.
        row_nbytes = sum(int(np.prod(np.shape(a)[1:])) * np.dtype(getattr(a, "dtype", float)).itemsize for a in arrays)
        nbytes = row_nbytes * longest
        return 1 if nbytes >= _LONG_STEP_NBYTES else max(1, min(max_repeats, MAX_LAUNCH_NBYTES // max(1, nbytes)))

    def _run_step_command(
        self, arrays: list[Array], batch: BatchArgument, batch_s: Any, num_slices: int, n_steps: int = 1
    ) -> list[WeightedLoss] | None:
        """Take ``n_steps`` steps in one command, with the rows of each rank ordered by steps.

        Return the losses as `take_steps_with_weights` does; None, without a step, if some rank cannot take several in
        one command.
        """
        session = ranks.get_session()
        self._optimizer.ensure_scattered()
        with session.call_lock:
            session.wait_until_idle()
            dispatcher = get_dispatcher(self.gradient)
            update_dispatchers = [get_dispatcher(update) for update in self._update_functions]
            gradient_call = dispatcher.build_call(session, arrays, batch=batch, batch_s=batch_s, num_slices=num_slices)
            n_ranks_with_rows = self._count_ranks_with_rows(session, gradient_call)
            if not n_ranks_with_rows:
                raise ValueError(
                    "batch_s: expected at least one row on some rank, got none"
                    if self._graph.sliceable
                    else f"batch: expected at least one row, got {batch!r}"
                )
            every_rank_has_rows = n_ranks_with_rows == session.size
            if not every_rank_has_rows:
                # A rank without rows does not write its vector, which would still hold an earlier step's values.
                clear = get_dispatcher(self._clear_gradient_function)
                call = clear.build_call(session)
                clear.finish_call(session, call, session.run(call))
            update_calls = [update.build_call(session) for update in update_dispatchers]
            engine = dispatcher.computation.engine
            can_fuse = every_rank_has_rows and not gradient_call.is_sliced and engine.can_fuse_steps(session.rank)
            command: StepCommand | ShardedStepCommand
            if self._sharded_step_variables:
                command = self._make_sharded_step_command(session, gradient_call, update_calls, n_steps, can_fuse)
            else:
                command = self._make_step_command(session, gradient_call, update_calls[0], n_steps, can_fuse)
            results = session.run(command)
            if results is None:
                return None
            gradient_outputs, _ = results
            for update, call in zip(update_dispatchers, update_calls, strict=True):
                update.finish_call(session, call, [])  # updates have no outputs
            outputs = dispatcher.finish_call(session, gradient_call, gradient_outputs)
        weights = outputs[n_steps:] or [None] * n_steps
        return list(zip(outputs[:n_steps], weights, strict=True))

    def _make_step_command(
        self, session: ranks.Session, gradient_call: Call, update_call: Call, n_steps: int, can_fuse: bool
    ) -> StepCommand:
        """Make the command of steps with an unsharded optimizer."""
        all_reduce = prepare_command(session, self.grad_shared, AllReduce, ("avg", True))
        command = StepCommand(
            gradient_call,
            all_reduce,
            update_call,
            self._exchange_dtype,
            self._n_tail_items,
            n_steps,
            can_fuse,
            can_fuse and can_skip_comparisons(session.rank, all_reduce),
        )
        if command != self._last_command:
            self._last_command = command
        return self._last_command  # equal steps are one object, which ranks recognize

    def _make_sharded_step_command(
        self, session: ranks.Session, gradient_call: Call, update_calls: Sequence[Call], n_steps: int, can_fuse: bool
    ) -> ShardedStepCommand:
        """Make the command of steps with a sharded optimizer."""
        keys = distribute_variables(session, self._sharded_step_variables)
        matrix_key, row_key, rank_number_key, *state_keys = keys
        return ShardedStepCommand(
            gradient_call,
            update_calls[0],
            update_calls[1],
            matrix_key,
            row_key,
            rank_number_key,
            tuple(state_keys),  # a command is hashable, so that its pickle is cached
            self._gathers_gradient,
            n_steps,
            can_fuse,
        )

    def _count_ranks_with_rows(self, session: ranks.Session, gradient_call: Call) -> int:
        """Count the ranks that have rows.  If only the ranks know their numbers of rows, this runs a command."""
        if gradient_call.n_total_rows is not None:
            return min(gradient_call.n_total_rows, session.size)
        selections = gradient_call.batch_s or (slice(None),) * session.size
        lengths = [0] * session.size
        if slice in map(type, selections):
            layouts = session.run(GetLayouts(distribute_variables(session, self._graph.sliceable)))
            lengths = [min(shape[0] for shape, _ in shapes) for shapes in zip(*layouts, strict=True)]
        counts = [
            len(range(length)[selection]) if isinstance(selection, slice) else selection.shape[0]
            for selection, length in zip(selections, lengths, strict=True)
        ]
        return len(counts) - counts.count(0)


def make_train_function(
    loss: Variable,
    params: Sequence[SharedVariable],
    x: Variables,
    y: Variables,
    update_rule: UpdateRule,
    sliceable_shareds: Sequence[SharedVariable] | None = None,
    extra_updates: UpdatesArgument | None = None,
    exchange_dtype: str | None = None,
    weight: Variable | None = None,
    clip_norm: float | None = None,
    num_slices: int = 1,
    ema: float | None = None,
    loss_scale: str | None = None,
    shard_optimizer: bool = False,
    **update_rule_kwargs: Any,
) -> TrainFunction:
    """Make a function that takes a training step on all ranks.

    Call `synkhronos.fork` first.

    Parameters
    ----------
    loss : scalar variable
        Loss to minimize: a mean over the rows of `x`, plus terms that do not depend on the rows, if any.  Ranks average
        it, so a sum over rows would be divided by the number of ranks.
    params : list of shared variables
        Parameters to train.
    x, y : variable or list of variables
        Inputs and targets, whose rows are scattered over the ranks.  A list of targets may be empty.
    update_rule : callable
        A rule of `synkhronos.training.updates`, or a function with its arguments and results.
    sliceable_shareds : list of shared variables, optional
        Data that `synkhronos.scatter` has distributed, so that each rank holds its own rows.  There is one shared
        variable for each of `x` and `y`, of its type.  On a rank, all of these have equally many rows.
    extra_updates : dict, or list of (shared variable, expression) or (shared variable, expression, op), optional
        Further updates of a step, such as those of running averages, each computed from the rows of `x` and `y`.

        - "mean": the new values are averaged over ranks and slices by rows, in the all-reduce of the gradient.  The
          expression has to be a mean over rows, as the loss is.
        - None: each rank keeps the value of its own last step.  Over slices, floats are averaged.  For other types the
          last slice's value is kept.

        The default op is "mean" for floats, and None for random streams.  Another variable needs an op, unless its new
        value is equal on all ranks.  Parameters are updated after these.
    exchange_dtype : str, optional
        Dtype in which gradients are exchanged.  With ``"bfloat16"``, GPUs send them in half the bytes, rounded to eight
        bits of mantissa.  This applies where a step is one launch: not on CPU cores, in slices, with ranks that have no
        rows, or with Theano.  The update computes in the parameters' precision.
    weight : scalar variable, optional
        Number of items that the loss is a mean over, if they are not the rows of `x`: ``mask.sum()`` for the loss
        ``(mask * errors).sum() / mask.sum()``.  It must not depend on `params`.  Gradients and losses are averaged by
        this weight over ranks and slices.  A loss of weight 0 is ignored, even if it is NaN.
    clip_norm : float, optional
        Maximal norm of the gradient, after the all-reduce.  A longer gradient is scaled to it.
    num_slices : int, optional
        Default number of slices of a step.  Gradients are accumulated over slices, so that a step needs less memory.
    ema : float, optional
        Decay of a moving average of the parameters, such as 0.999, in at least float32: `TrainFunction.get_ema`.
    loss_scale : {"dynamic"}, optional
        Scale the loss, so that small gradients in float16 are not 0.  If the reduced gradient is infinite or NaN, the
        parameters, the rule's variables and the averages stay unchanged on all ranks, and the scale is halved.  It is
        doubled after 2,000 other steps.  `extra_updates` are not skipped.
    shard_optimizer : bool, optional
        Divide the optimizer's state among the ranks (ZeRO-1), so that each needs memory for one n-th of it.  State that
        the rule reads as whole arrays, such as the momentum of `muon`'s matrices, stays whole on every rank.  `lamb` is
        refused, since it reads all of its state as whole arrays.  See `TrainFunction.get_optimizer_state`.
    **update_rule_kwargs
        Options of the update rule, such as ``learning_rate=0.1``.

    Returns
    -------
    TrainFunction
        Called as ``train(x_data, y_data, batch=None)``, or with `sliceable_shareds` as ``train(batch_s=None)``.

    Warns
    -----
    UserWarning
        If the loss, without a `weight`, or an averaged expression has a denominator that depends on the values of
        inputs.

    Examples
    --------
    >>> import numpy as np
    >>> import pytensor, pytensor.tensor as pt
    >>> import synkhronos as synk
    >>> from synkhronos.training.updates import adam
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
    if exchange_dtype not in (None, "bfloat16"):
        raise ValueError(f"exchange_dtype: expected None or 'bfloat16', got {exchange_dtype!r}")
    options = StepOptions(clip_norm, num_slices, ema, loss_scale=loss_scale, shard_optimizer=shard_optimizer)
    graph = TrainingGraph(
        loss, params, x, y, update_rule, update_rule_kwargs, options, sliceable_shareds, extra_updates, weight
    )
    graph.warn_of_varying_denominators()
    return TrainFunction(graph, exchange_dtype)


def _find_common_length(arrays: list[Array]) -> int | None:
    """Return the number of rows of the data, or None if their lengths differ, or some are minibatches of more rows."""
    try:
        if any(np.ndim(array) == 0 or getattr(array, "minibatch", False) for array in arrays):
            return None
    except ValueError:
        return None  # lists that form no array: a single step raises the error that names them
    lengths = {len(array) for array in arrays}
    return lengths.pop() if len(lengths) == 1 else None
