"""Means over the ranks within compiled functions, such as the statistics of batch normalization.

A compiled function calls `average_over_ranks` where its graph has a `RankMeanOp` (`synkhronos.extensions.rank_mean`)::

    rank 0   rows --> mean of its rows -----------------------+                                     +--> next operation
    rank 1   rows --> mean of its rows -----------------------+--> mean over ranks, by their rows --+--> next operation
    rank 2   no rows: `RankMeanContext.contribute_no_rows` --+

All ranks run the same function, so they compute the same means in the same order.  XLA calls `average_over_ranks` from
a thread of its own, while the main thread waits for the launch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

from synkhronos.graph_libraries import get_library
from synkhronos.variable_types import Array, CompiledFunction, Node, Op, Variable


class RankMeanContext:
    """The means over ranks that one launch of a compiled function computes on this rank.

    ``all_gather`` takes this rank's bytes, and returns those of all ranks, in rank order.  ``n_means`` is the number of
    means over ranks in the function; None if it is unknown.
    """

    #: Context of the launch in progress in this process.
    current: ClassVar[RankMeanContext | None] = None
    #: Whether means over ranks are refused, because ranks call functions at their own pace.
    is_forbidden: ClassVar[bool] = False

    def __init__(self, all_gather: Callable[[bytes], Sequence[bytes]], n_means: int | None = None):
        self._all_gather, self._n_means = all_gather, n_means
        self._n_done = 0
        self._error: BaseException | None = None

    @contextlib.contextmanager
    def activate(self) -> Iterator[None]:
        """Provide this context to the means of a function that is launched and waited for in the ``with`` block.

        An error of a mean within the launch is raised in place of the error that XLA makes of it.
        """
        RankMeanContext.current = self
        try:
            yield
        except Exception:
            if self._error is not None:
                raise self._error from None
            raise
        finally:
            RankMeanContext.current = None
        if self._n_means not in (None, self._n_done):
            raise RuntimeError(f"this rank has computed {self._n_done} means over ranks, expected {self._n_means}")

    def contribute_no_rows(self) -> None:
        """Take part in the collectives of a launch on a rank without rows."""
        for _ in range(self._n_means or 0):
            self._all_gather(b"")

    def average(self, values: np.ndarray, weight: float) -> np.ndarray:
        """Return the mean of the ranks' vectors, each with its rank's weight."""
        self._n_done += 1
        try:
            weighted = np.append(np.asarray(values, np.float64) * weight, weight)
            gathered = self._all_gather(weighted.tobytes())
            total = np.sum([np.frombuffer(vector) for vector in gathered if vector], axis=0)
        except BaseException as error:
            self._error = error
            raise
        return np.asarray(total[:-1] / total[-1], values.dtype)

    @classmethod
    @contextlib.contextmanager
    def forbid(cls) -> Iterator[None]:
        """Forbid means over ranks in the ``with`` block, in which ranks call functions at their own pace."""
        was_forbidden, cls.is_forbidden = cls.is_forbidden, True
        try:
            yield
        finally:
            cls.is_forbidden = was_forbidden


def average_over_ranks(values: np.ndarray, weight: float) -> np.ndarray:
    """Return the mean of a vector over the ranks; outside a call on all ranks, return the vector itself."""
    context = RankMeanContext.current
    if context is not None:
        return context.average(np.asarray(values), float(weight))
    if RankMeanContext.is_forbidden:
        raise make_own_pace_error()
    return np.asarray(values)


def make_own_pace_error() -> RuntimeError:
    """Return the error of a mean over ranks that call functions at their own pace."""
    return RuntimeError(
        "rank_mean, sync=True: ranks call this function at their own pace (exchange rules other than BSP(), a class's "
        "validation, programs); use make_train_function, BSP() in make_trainer or the launcher, or synkhronos.function"
    )


class RankMeanOp:
    """Mixin of the Ops of PyTensor and Theano: the mean of a vector over the ranks, weighted by their numbers of rows.

    The loss of all ranks is this mean of the ranks' losses, so its gradient is the same mean of the ranks' gradients.
    """

    __props__ = ()

    def make_node(self, values: Variable, rows: Variable) -> Node:
        """Return the node for a vector of values and the scalar number of rows."""
        return self.apply_class(self, [values, rows], [values.type()])  # type: ignore[attr-defined]

    def perform(self, node: Node, inputs: Sequence[Array], outputs: list[list[Any]], params: Any = None) -> None:
        """Compute the mean over the ranks."""
        outputs[0][0] = np.array(average_over_ranks(*inputs))

    def infer_shape(self, *arguments: Any) -> list[Any]:
        """Return the shape of the vector."""
        return [arguments[-1][0]]

    def do_constant_folding(self, *_: object) -> bool:
        """Return False: folding would wait for the other ranks while this one compiles."""
        return False

    def connection_pattern(self, node: Node) -> list[list[bool]]:
        """Return the inputs with a derivative: the vector, but not the number of rows."""
        return [[True], [False]]

    def _compute_gradients(self, inputs: Sequence[Variable], gradients: Sequence[Variable]) -> list[Variable]:
        disconnected = self.disconnected_type()  # type: ignore[attr-defined]
        return [self(gradients[0], inputs[1]), disconnected()]  # type: ignore[operator]

    def grad(self, inputs: Sequence[Variable], gradients: Sequence[Variable]) -> list[Variable]:
        """Return the gradients with respect to the inputs (Theano)."""
        return self._compute_gradients(inputs, gradients)

    def pullback(
        self, inputs: Sequence[Variable], outputs: Sequence[Variable], gradients: Sequence[Variable]
    ) -> list[Variable]:
        """Return the gradients with respect to the inputs (PyTensor)."""
        return self._compute_gradients(inputs, gradients)


def count_rank_means(function: CompiledFunction) -> int:
    """Return the number of means over ranks in a compiled function.

    Within an inner graph, such as a loop's, which ranks may run different numbers of times, they are an error.
    """
    nodes = function.maker.fgraph.toposort()
    count = sum(isinstance(node.op, RankMeanOp) for node in nodes)
    inner = [inner_node for node in nodes for inner_node in _list_inner_nodes(node.op)]
    while inner:
        node = inner.pop()
        if isinstance(node.op, RankMeanOp):
            raise NotImplementedError("rank_mean, sync=True: not within loops (scan) and other inner graphs")
        inner += _list_inner_nodes(node.op)
    return count


def _list_inner_nodes(op: Op) -> list[Node]:
    """Return the nodes of an Op's inner graph: ``fgraph`` in PyTensor, ``outputs`` of Theano's loops."""
    graph, outputs = getattr(op, "fgraph", None), getattr(op, "outputs", None)
    if graph is not None:
        return list(graph.toposort())
    return get_library(outputs[0]).sort_nodes(outputs) if isinstance(outputs, list) and outputs else []
