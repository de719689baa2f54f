"""The Op of `synkhronos.extensions.rank_mean` in Theano."""

from __future__ import annotations

from theano.gof import Apply, Op
from theano.gradient import DisconnectedType

from synkhronos.extensions.rank_mean import _RankMean


class RankMean(_RankMean, Op):
    """Mean of a vector over the ranks."""

    apply_class, disconnected_type = Apply, DisconnectedType
