"""Base class of models for the launcher: subclasses define the network and the data."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from synkhronos.casts import cast
from synkhronos.checks import describe, format_similar
from synkhronos.devices import get_array_device
from synkhronos.functions.rank_mean_context import count_rank_means
from synkhronos.graph_libraries import get_library, is_variable
from synkhronos.launcher.configuration.settings import MODEL_OPTION_NAMES, check_model_options
from synkhronos.launcher.model_class.model_data import ModelData
from synkhronos.launcher.model_class.model_interface import ModelInterfaceError, check_interface, shorten_repr
from synkhronos.training import updates
from synkhronos.training.train_function.extra_updates import append_averaged_updates
from synkhronos.training.train_function.step_options import StepOptions
from synkhronos.training.train_function.training_graph import TrainingGraph, build_local_updates, replace_params
from synkhronos.training.train_function.weighted_mean import warn_of_varying_denominators
from synkhronos.training.updates.flat_gradient import FlatGradient
from synkhronos.training.updates.sharded_updates import ShardedUpdates, ShardedVariable
from synkhronos.training.updates.update_rule import RuleUpdates
from synkhronos.variable_types import SharedVariable


def _to_update_dict(updates: Any) -> dict[Any, Any]:
    """Return the updates of Lasagne's or this library's rules as a dict."""
    if not isinstance(updates, Mapping | list | tuple):
        raise ModelInterfaceError(f"updates(): expected the result of an update rule, got {shorten_repr(updates)}")
    return build_local_updates(updates) if isinstance(updates, RuleUpdates) else dict(updates)


def _snapshot_value(shared: SharedVariable) -> Any:
    """Return a snapshot of a variable's value.  On a GPU the value may not be computed yet."""
    value = get_library(shared).borrow_value(shared)
    return get_array_device(value).snapshot(value)


class Model:
    """Base class of models made with Lasagne, PyTensor or Theano; subclasses override `build` and `load`.

    .. code-block:: python

        class Digits(Model):
            batch_size, n_epochs, rate = 50, 5, 0.1

            def build(self):
                x, y = T.matrix("x"), T.ivector("y")
                net = DenseLayer(InputLayer((None, 784), x), 10, nonlinearity=softmax)
                out = get_output(net)
                self.inputs, self.params = [x, y], get_all_params(net, trainable=True)
                self.loss = categorical_crossentropy(out, y).mean()
                self.error = T.neq(out.argmax(1), y).mean()

            def load(self):
                return [x_train, y_train], [x_valid, y_valid]

    Instead of a list of arrays `load` may return a `synkhronos.loading.Loader`; each rank reads its own batches.

    Parameters
    ----------
    config : dict
        ``rank``, ``size``, ``seed``, and the entries of ``config`` in the session file.

    Attributes
    ----------
    batch_size, n_epochs : int
        Number of a rank's rows in a step; number of epochs.
    rate : float
        The learning rate; override `adjust_hyperp` to change ``shared_lr`` after an epoch.
    updates : callable
        Update rule of `synkhronos.training.updates` or Lasagne: ``updates(loss, params, learning_rate=...)``.
    clip_norm, num_slices, ema, loss_scale, shard_optimizer
        Options of the step, as in `synkhronos.training.make_train_function`.  A session sets them in the table
        ``model_options``.  With one of them BSP reduces gradients, so that the result equals that of one process.
    validate_ema : bool
        Whether the averages of `ema` are validated, and written into ``params.npz``, instead of the parameters.
    trainable_params : list of shared variables
        The `params` that `build` sets; afterwards `params` also has the running averages.
    ema_params : list of shared variables or None
        Moving averages of `trainable_params`, at least float32; None without the option `ema`.
    vels, vels2 : list of shared variables
        The gradient's vector, if BSP reduces gradients; empty otherwise.  With ``shard_optimizer`` `vels` is a matrix
        with a row for each rank, and `vels2` is this rank's row.
    updated_variables : list of shared variables
        Variables that the unsharded update rule updates, in its order, if BSP reduces gradients.
    sharded_variables : dict
        Sharded variables of the optimizer, by the variable of the unsharded one; empty without ``shard_optimizer``.
    gathers_gradient : bool
        Whether the sharded update reads the reduced gradient of all ranks in `vels`, as for its norm.
    has_new_shards : bool
        Whether `vels2` has this rank's new parameters, from `apply_gradients`, in place of gradients.
    has_rank_means : bool
        Whether the step has means over the rows of all ranks, such as batch normalization with ``sync=True``.
    step_outputs : list of shared variables
        Cost of the last step, followed by its error and weight if the model has them.
    weights_by_rows : bool
        Whether costs are weighted by rows: the loader may skip rows, and the model has no ``weight``.
    """

    batch_size = 100
    n_epochs = 1
    rate = 0.01
    #: Whether the learning rate rises over five epochs to `rate` times the number of ranks, under BSP.
    warmup = False
    clip_norm: float | None = None
    num_slices = 1
    ema: float | None = None
    validate_ema = False
    loss_scale: str | None = None
    shard_optimizer = False

    #: Variables that `build` sets.
    inputs: Sequence[Any]
    params: list[Any]
    loss: Any
    #: Error to report besides the loss; `build` may set it.
    error: Any = None
    #: Number of items that `loss`, `error` and `val_outputs` are means over, if these are not the rows: a scalar
    #: variable such as ``mask.sum()``.  Reported costs and errors are weighted by it; a batch of weight 0 is ignored.
    weight: Any = None
    #: Outputs of validation: cost, error, top-5 error.  The default is `loss` and `error`.  For a network with dropout
    #: or batch normalization, set them to its deterministic outputs.
    val_outputs: Sequence[Any] | None = None
    #: Running averages: the expression of each variable's next value.  Ranks exchange them like parameters.
    averages: Mapping[Any, Any] = MappingProxyType({})

    def __init__(self, config: dict[str, Any]):
        self.config = config
        self.rank, self.size, self.seed = config["rank"], config["size"], config["seed"]
        self.epoch = 0
        self.ema_params: list[Any] | None = None
        self.has_rank_means = False
        self.updated_variables: list[SharedVariable] = []
        self.sharded_variables: dict[Any, ShardedVariable] = {}
        self._gather_fn: Any = None
        self.gathers_gradient = self.has_new_shards = False
        self.vels: list[Any] = []
        self.vels2 = self.vels
        name = type(self).__name__
        self.data = ModelData(self.load(), name, self.batch_size, self.rank, self.size, self.seed)
        self.build()
        for attribute in ("inputs", "params"):
            if not isinstance(value := getattr(self, attribute, None), list | tuple):
                raise ModelInterfaceError(f"{name}.build(): expected it to set the list {attribute}, got {value!r}")
        self.trainable_params = list(self.params)
        self.params = [*self.trainable_params, *self.averages]

    def build(self) -> None:
        """Set `inputs`, `params`, `loss`, and optionally `error`, `weight`, `val_outputs` and `averages`."""
        raise ModelInterfaceError(f"{type(self).__name__} lacks the method build(), which sets inputs, params and loss")

    def load(self) -> tuple[Sequence[Any], Sequence[Any]]:
        """Return the training and the validation arrays, in the order of ``inputs``.  The latter may be empty."""
        raise ModelInterfaceError(f"{type(self).__name__} lacks the method load(), which returns the data")

    def prepare(self, arrays: list[Any], training: bool) -> list[Any]:
        """Preprocess or augment a batch, such as by random crops.  By default it is unchanged."""
        return arrays

    def updates(self, loss_or_grads: Any, params: list[SharedVariable], learning_rate: Any) -> Any:
        """Return the updates of the parameters; by default by Nesterov's momentum.

        If BSP reduces gradients, ``loss_or_grads`` is a list of the reduced gradients, and `weight` is None during this
        call.
        """
        rule_updates = updates.nesterov_momentum(loss_or_grads, params, learning_rate=learning_rate, weight=self.weight)
        return build_local_updates(rule_updates)

    def set_options(self, options: Mapping[str, Any]) -> None:
        """Set options of the step, before `compile_iter_fns`.  Raise TypeError or ValueError for a wrong one."""
        check_model_options(options)
        kinds = type(self).__mro__
        for name in {*vars(self), *(name for kind in kinds[: kinds.index(Model)] for name in vars(kind))}:
            similar = (
                "" if name.startswith("_") or hasattr(Model, name) else format_similar(name, MODEL_OPTION_NAMES, 0.85)
            )
            if similar:
                raise ValueError(f"{name}: unknown option{similar}")
        StepOptions(
            **{name: options.get(name, getattr(self, name)) for name in MODEL_OPTION_NAMES}
        )  # raises ValueError
        for name, value in options.items():
            setattr(self, name, value)

    @property
    def step_options(self) -> StepOptions:
        """The options of the step."""
        return StepOptions(**{name: getattr(self, name) for name in MODEL_OPTION_NAMES})

    # -- interface of model classes --------------------------------------------------------------------------

    def compile_iter_fns(self, sync_type: str = "avg") -> None:
        """Compile the training step and the validation function.

        With the sync type "cdd", or options of the step, it is compiled in two parts: `train_iter` computes the
        gradient, and `apply_gradients` updates the parameters.
        """
        self._check_graph()
        library = get_library(self.loss)
        self.shared_lr = library.shared(np.asarray(self.rate, self.params[0].type.dtype), name="learning_rate")
        outputs = [self.loss] if self.error is None else [self.loss, self.error]
        validation_outputs, is_sliced = list(self.val_outputs or outputs), self.num_slices > 1
        if self.weight is not None:
            outputs.append(self.weight)
            validation_outputs.append(self.weight)
        elif not self.rank:
            means = dict(zip(("loss", "error"), outputs, strict=False))
            means |= {f"val_outputs[{i}]": output for i, output in enumerate(self.val_outputs or ())}
            warn_of_varying_denominators(means, self.inputs, 1)
        # Results are variables, since PyTensor would wait for the outputs of a JAX function, and batches not overlap.
        self.step_outputs = [library.shared(np.zeros((), output.dtype)) for output in outputs]
        if sync_type == "cdd" or self.step_options.non_defaults:
            new_values = self._compile_update(library)
        else:
            new_values = {
                **_to_update_dict(self.updates(self.loss, self.trainable_params, self.shared_lr)),
                **self.averages,
            }
        if is_sliced:
            new_values |= self._average_slices(library, outputs)
        else:
            new_values |= zip(self.step_outputs, outputs, strict=True)
        self.train_fn = library.function(list(self.inputs), [], updates=list(new_values.items()))
        self.has_rank_means = bool(count_rank_means(self.train_fn))
        if is_sliced:
            if self.has_rank_means:
                raise ValueError(
                    f"num_slices: expected 1, got {self.num_slices}: the loss has means over all ranks' rows "
                    "(rank_mean, sync=True), and a slice has other means than the batch"
                )
            sums = [*self.vels, *self.step_outputs]
            zeros = [(shared, library.tensor.zeros_like(shared)) for shared in sums]
            self._clear_fn = library.function([], [], updates=zeros)
        if self.validate_ema:
            validation_outputs = replace_params(validation_outputs, self.trainable_params, self.ema_params)
        self.val_fn = library.function(list(self.inputs), validation_outputs)

    def _check_graph(self) -> None:
        """Raise ModelInterfaceError unless `build` has set the variables that a step is compiled from."""
        name = type(self).__name__
        check_interface(self, name)
        for x in self.inputs:
            if not is_variable(x):
                raise ModelInterfaceError(f"{name}.build(): inputs: expected variables, got {shorten_repr(x)}")
        for attribute in ("loss", "error", "weight"):
            value: Any = getattr(self, attribute, None)
            if is_variable(value) and value.type.ndim == 0 or value is None and attribute != "loss":
                continue
            got = f"{value!r} of {value.type}" if is_variable(value) else shorten_repr(value)
            raise ModelInterfaceError(
                f"{name}.build(): {attribute}: expected a symbolic scalar, such as errors.mean(), got {got}"
            )
        library = get_library(self.loss)
        for leaf in (v for node in library.sort_nodes([self.loss]) for v in node.inputs if v.owner is None):
            if not (library.is_shared(leaf) or library.is_constant(leaf) or any(leaf is x for x in self.inputs)):
                raise ModelInterfaceError(f"{name}.build(): inputs lacks {describe(leaf)}, which the loss depends on")

    def _compile_update(self, library: Any) -> dict[Any, Any]:
        """Compile the update of the parameters from the gradient's vector.  Return the updates of the gradient."""
        training = TrainingGraph(
            loss=self.loss,
            params=self.trainable_params,
            x=list(self.inputs),
            y=[],
            update_rule=self._update_by_gradients,
            update_rule_kwargs={"learning_rate": self.shared_lr},
            options=self.step_options,
            extra_updates=[(shared, new, "mean") for shared, new in self.averages.items()],
            weight=self.weight,
        )
        rule_updates, _ = append_averaged_updates(training.rule_updates, training.extra_updates, training.x[0])
        equal = {u.shared: u.expression for u in training.extra_updates if not u.may_differ}
        self.updated_variables = list(rule_updates.param_updates)
        vector = row = rule_updates.grad_shared
        if self.shard_optimizer and self.size > 1:
            rule_updates, row = self._shard_updates(library, rule_updates)
            vector = rule_updates.grad_shared
        self.ema_params, self.vels, self.vels2 = training.ema, [vector], [row]
        self._apply_fn = library.function([], [], updates=list({**rule_updates.param_updates, **equal}.items()))
        gradient = rule_updates.grad_updates[vector]
        return {vector: vector + gradient if self.num_slices > 1 else gradient}

    def _shard_updates(self, library: Any, rule_updates: RuleUpdates) -> tuple[RuleUpdates, Any]:
        """Shard updates over the ranks.  Return the updates of this rank, and its row of the gradient's matrix.

        The updates replace the reduced gradient in the row by new parameters.  `_gather_fn` copies the parameters from
        the matrix of all ranks' rows.
        """
        shards = ShardedUpdates(rule_updates, self.trainable_params, self.size, f"{type(self).__name__}.updates()")
        self.sharded_variables, self.gathers_gradient = shards.sharded_variables, shards.gathers_gradient
        for variable in self.sharded_variables.values():
            variable.set_shard(self.rank, self.size)
        # A constant, since a shared variable would be in checkpoints, from which ranks with other numbers resume.
        number = {shards.rank_number: library.tensor.constant(self.rank, dtype="int64")}
        new_values = library.clone(list(shards.local_updates.values()), number)
        updates = OrderedDict(zip(shards.local_updates, new_values, strict=True))
        self._gather_fn = library.function([], [], updates=list(shards.whole_updates.items()))
        return RuleUpdates(shards.grad_updates, updates, shards.grad_shared), shards.row

    def _update_by_gradients(
        self, loss_or_grads: Any, params: list[SharedVariable], weight: Any = None, learning_rate: Any = None
    ) -> RuleUpdates:
        """Apply `updates`, which may be a rule of Lasagne's, to the reduced gradients."""
        flat = FlatGradient(loss_or_grads, params, weight)
        own_weight, self.weight = self.weight, None  # the gradients are weighted already
        try:
            updates = _to_update_dict(self.updates(list(flat.iterate_gradients()), params, learning_rate))
        except Exception as error:
            error.add_note("updates(): BSP reduces gradients here, so it gets a list of gradients, one per parameter")
            raise
        finally:
            self.weight = own_weight
        return RuleUpdates(OrderedDict({flat.shared: flat.expression}), OrderedDict(updates), flat.shared)

    def _average_slices(self, library: Any, outputs: list[Any]) -> dict[Any, Any]:
        """Return updates of `step_outputs` that average over the slices of a batch.  The last is the sum of weights."""
        tensor, dtype = library.tensor, str(np.result_type(self.loss.dtype, np.float32))
        weight = tensor.cast(self.inputs[0].shape[0], dtype) if self.weight is None else outputs.pop()
        if self.weight is None:
            self.step_outputs.append(library.shared(np.zeros((), dtype)))
        total = self.step_outputs[-1]
        new_values = {total: tensor.cast(total + weight, total.dtype)}
        for shared, value in zip(self.step_outputs[:-1], outputs, strict=True):
            mean = shared + (value - shared) * weight / (total + weight)
            new_values[shared] = tensor.cast(tensor.switch(tensor.eq(weight, 0), shared, mean), shared.dtype)
        return new_values

    def train_iter(self, count: int, recorder: Any) -> None:
        """Take a step with the next batch of this rank.  If BSP reduces gradients, only compute the gradient."""
        batch = self.next_batch(recorder)
        recorder.start()
        if self.num_slices == 1:
            self.train_fn(*batch)
        else:
            self._clear_fn()
            for rows in np.array_split(np.arange(len(batch[0])), self.num_slices):
                if rows.size:
                    self.train_fn(*(array[rows[0] : rows[-1] + 1] for array in batch))
        if self.has_rank_means:  # XLA computes these means before the exchange of this step
            updated = [*self.params, *self.vels, *self.step_outputs]
            values = [get_library(shared).borrow_value(shared) for shared in updated]
            get_array_device(values[0]).wait(values)
        recorder.end("calc")
        n_costs = 1 if self.error is None else 2
        values = list(map(_snapshot_value, self.step_outputs))
        options: dict[str, Any] = {}  # other recorders, such as Theano-MPI's, take no weight
        if self.weights_by_rows:
            options["weight"] = len(batch[0])
        elif self.weight is not None:
            options["weight"] = values[n_costs]
        recorder.train_error(count, *values[:n_costs], **options)

    @property
    def weights_by_rows(self) -> bool:
        """Whether costs are weighted by rows: the loader may skip rows, and there is no `weight`."""
        return self.weight is None and self.data.may_skip_rows

    def apply_gradients(self) -> bool:
        """Update the parameters from the reduced gradient.  Do nothing if the step has a single part.

        Return `has_new_shards`: whether the ranks have to gather `vels2` into `vels`, and then call this method again.
        """
        if self.has_new_shards:
            self._gather_fn()
        elif self.vels:
            self._apply_fn()
        self.has_new_shards = self._gather_fn is not None and not self.has_new_shards
        return self.has_new_shards

    def next_batch(self, recorder: Any) -> list[np.ndarray]:
        """Return the next batch of this rank.  Each epoch has another order.  The time is recorded as "wait"."""
        recorder.start()
        batch = self._prepare_batch(self.data.take_training_batch(self.epoch), True)
        recorder.end("wait")
        return batch

    def skip_iter(self, count: int) -> None:
        """Skip the first batches of this rank in the epoch, to resume after them."""
        self.data.start_epoch(self.epoch, count)

    def reset_iter(self, mode: str) -> None:
        """Restart the validation data, if ``mode`` is "val"."""
        if mode == "val":
            self.data.restart_validation()

    def val_iter(self, count: int, recorder: Any) -> None:
        """Validate the next batch of this rank."""
        arrays = self.data.take_validation_batch()
        if arrays is not None:  # None if the loader has skipped a batch
            batch = self._prepare_batch(arrays, False)
            values = list(self.val_fn(*batch))
            rows = len(batch[0]) if self.weight is None else float(values.pop())
            recorder.val_error(count, *values, rows=rows)

    def adjust_hyperp(self, epoch: int) -> None:
        """Keep the learning rate; override this to change ``shared_lr`` after an epoch."""

    def cleanup(self) -> None:
        """Close the loaders, if the data has any."""
        self.data.close()

    def _prepare_batch(self, arrays: Sequence[Any], training: bool) -> list[np.ndarray]:
        prepared, name = self.prepare(list(arrays), training), type(self).__name__
        if len(prepared) != len(self.inputs):
            raise ModelInterfaceError(
                f"{name}: expected an array for each of inputs, {len(self.inputs)}, from load() or prepare(), got "
                f"{len(prepared)}"
            )
        batch = []
        for array, x in zip(prepared, self.inputs, strict=True):
            try:
                batch.append(cast(array, x.type.dtype, describe(x)))
            except TypeError as error:
                raise ModelInterfaceError(f"{name}, data of {error}") from None
            if batch[-1].ndim != x.type.ndim:
                raise ModelInterfaceError(
                    f"{name}, data of {describe(x)}: expected {x.type.ndim} dimensions, got shape {batch[-1].shape}"
                )
        return batch
