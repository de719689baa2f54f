"""The Op of `synkhronos.extensions.rank_mean` in PyTensor, and its lowering to JAX."""

from __future__ import annotations

from typing import Any

import numpy as np
from pytensor.gradient import DisconnectedType
from pytensor.graph.basic import Apply

from synkhronos.engines.rank_mean import average_over_ranks
from synkhronos.extensions.rank_mean import _RankMean
from synkhronos.lowering.numpy_op import NumpyOp, register_lowering


class RankMean(_RankMean, NumpyOp):
    """Mean of a vector over the ranks."""

    apply_class, disconnected_type = Apply, DisconnectedType


@register_lowering(RankMean)
def _lower(op: RankMean, values: Any, rows: Any) -> Any:
    import jax
    from jax.experimental import io_callback

    def average(values: Any, rows: Any) -> np.ndarray:
        return average_over_ranks(np.asarray(values), rows)

    return io_callback(average, jax.ShapeDtypeStruct(values.shape, values.dtype), values, rows, ordered=True)
