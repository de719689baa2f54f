"""Common part of the Ops of `synkhronos.extensions.rank_mean` in PyTensor and Theano."""

from __future__ import annotations

from typing import Any

import numpy as np

from synkhronos.engines.rank_mean import MARK, average_over_ranks


class RankMeanOp:
    """Mixin of the Ops of PyTensor and Theano: the mean of a vector over the ranks, weighted by their numbers of rows.

    Each rank's loss is a mean over its rows, and the loss of all ranks their mean by rows.  So the gradient is the same
    mean, of the ranks' gradients.
    """

    __props__ = ()

    def make_node(self, values: Any, rows: Any) -> Any:
        """Return the node of a vector and a scalar."""
        return self.apply_class(self, [values, rows], [values.type()])  # type: ignore[attr-defined]

    def perform(self, node: Any, inputs: Any, outputs: Any, params: Any = None) -> None:
        """Average over the ranks."""
        outputs[0][0] = np.array(average_over_ranks(*inputs))

    def infer_shape(self, *arguments: Any) -> list[Any]:
        """Return the shape of the vector."""
        return [arguments[-1][0]]

    def do_constant_folding(self, *_: Any) -> bool:
        """Return False: the compilation of one rank would wait for the others."""
        return False

    def connection_pattern(self, node: Any) -> list[list[bool]]:
        """Return the derivatives that exist: with respect to the vector, not to the number of rows."""
        return [[True], [False]]

    def _differentiate(self, inputs: Any, gradients: Any) -> list[Any]:
        disconnected = self.disconnected_type()  # type: ignore[attr-defined]
        return [self(gradients[0], inputs[1]), disconnected()]  # type: ignore[operator]

    def grad(self, inputs: Any, gradients: Any) -> list[Any]:
        """Return the gradients with respect to the inputs (Theano)."""
        return self._differentiate(inputs, gradients)

    def pullback(self, inputs: Any, outputs: Any, gradients: Any) -> list[Any]:
        """Return the gradients with respect to the inputs (PyTensor)."""
        return self._differentiate(inputs, gradients)


setattr(RankMeanOp, MARK, True)
