"""Update rules for training one model on all ranks.

Each rule returns a `RuleUpdates`, the triple ``(grad_updates, param_updates, grad_shared)``.  Signatures, formulas and
defaults are those of Lasagne.  :doc:`extensions` shows the three calls of a step, which
`synkhronos.training.make_train_function` combines into one callable.

**The reduced gradient.**  By default the ranks' gradients have equal weights.  For a loss that is a mean over rows this
is exact only if all ranks have the same number of rows.  Pass ``weight=x.shape[0]`` for an exact mean: each rank's
gradient is multiplied by its weight, the vector ends with the weight, and the rule divides the reduced gradient by the
reduced weight.  The all-reduce may then be ``"avg"`` (the default) or ``"sum"``.

The caller has two duties, which `make_train_function` fulfils:

- With `num_slices`, use the op ``"sum"`` for the gradient's update:
  ``updates=[(grad_shared, grad_updates[grad_shared], "sum")]``.  With the default, "avg", a rank that has fewer rows
  than slices would have too large a weight.
- Set `grad_shared` to zero on all ranks before a call with fewer rows than ranks.  A rank without rows does not update
  it, and would still hold the gradient of an earlier call.

**Hyperparameters** such as `learning_rate` are numbers, symbolic scalars or shared variables.  Each rank has
its own copy of a shared variable: give it a new value with ``synk.broadcast(learning_rate, value)``.

**Types.**  Each parameter is updated in its own dtype.  The flat vector has the widest dtype among the
parameters, and at least float32.
"""

from synkhronos.training.updates.decoupled_optimizers import adamw, lamb, lion, muon
from synkhronos.training.updates.master_weights import master_weights
from synkhronos.training.updates.optimizers import (
    adadelta,
    adagrad,
    adam,
    adamax,
    amsgrad,
    apply_momentum,
    apply_nesterov_momentum,
    momentum,
    nesterov_momentum,
    rmsprop,
    sgd,
)
from synkhronos.training.updates.transformations import (
    add_decayed_weights,
    chain,
    clip,
    clip_by_global_norm,
    norm_constraint,
    partition,
    scale,
    total_norm_constraint,
)
from synkhronos.training.updates.update_rule import RuleUpdates

__all__ = [
    "RuleUpdates",
    "adadelta",
    "adagrad",
    "adam",
    "adamax",
    "adamw",
    "add_decayed_weights",
    "amsgrad",
    "apply_momentum",
    "apply_nesterov_momentum",
    "chain",
    "clip",
    "clip_by_global_norm",
    "lamb",
    "lion",
    "master_weights",
    "momentum",
    "muon",
    "nesterov_momentum",
    "norm_constraint",
    "partition",
    "rmsprop",
    "scale",
    "sgd",
    "total_norm_constraint",
]
