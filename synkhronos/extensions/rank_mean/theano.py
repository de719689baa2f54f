"""The Op of `synkhronos.extensions.rank_mean` in Theano."""

from __future__ import annotations

from theano.gof import Apply, Op
from theano.gradient import DisconnectedType

from synkhronos.functions.rank_mean_context import RankMeanOp


class TheanoRankMean(RankMeanOp, Op):
    """Mean of a vector over the ranks."""

    apply_class, disconnected_type = Apply, DisconnectedType
