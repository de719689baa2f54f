"""The Op of `synkhronos.extensions.rank_mean` in PyTensor, and its lowering to JAX."""

from __future__ import annotations

from typing import Any

from pytensor.gradient import DisconnectedType
from pytensor.graph.basic import Apply

from synkhronos.functions.rank_mean_context import RankMeanOp, average_over_ranks
from synkhronos.lowering.numpy_op import NumpyOp, call_ordered_callback, register_lowering


class PytensorRankMean(RankMeanOp, NumpyOp):
    """Mean of a vector over the ranks."""

    apply_class, disconnected_type = Apply, DisconnectedType


@register_lowering(PytensorRankMean)
def _lower(op: PytensorRankMean, values: Any, rows: Any) -> Any:
    return call_ordered_callback(average_over_ranks, values, rows)
