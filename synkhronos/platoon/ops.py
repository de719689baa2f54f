"""All-reduce as an Op; all workers have to call functions with it in the same order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import theano
from theano import tensor

from synkhronos.compat import library
from synkhronos.platoon.channel.worker import Worker
from synkhronos.platoon.training.global_dynamics import get_worker


class AllReduce(theano.Op):
    """Reduction of an array over all workers, by an op of `Worker.all_reduce`."""

    __props__ = ("op",)

    def __init__(self, op: str, worker: Worker | None = None):
        if worker is not None and not isinstance(worker, Worker):
            raise TypeError(f"worker: expected a platoon Worker, got {worker!r}")
        self.op = op
        self.worker = get_worker() if worker is None else worker

    def __str__(self) -> str:
        return f"AllReduce{{{self.op}}}"

    def make_node(self, src: Any, dest: Any = None) -> Any:
        """Return the node; the result has the type of ``src``, and does not use the memory of ``dest``."""
        src = tensor.as_tensor_variable(src)
        if dest is not None and tensor.as_tensor_variable(dest).type != src.type:
            raise TypeError(f"dest: expected {src.type}, as src, got {tensor.as_tensor_variable(dest).type}")
        return theano.Apply(self, [src], [src.type()])

    def perform(self, node: Any, inputs: Any, outputs: Any, *_: Any) -> None:
        """Reduce the input over all workers."""
        outputs[0][0] = self.worker.all_reduce(inputs[0], self.op)

    def infer_shape(self, *arguments: Any) -> list[Any]:
        """Return the shape of the input."""
        return [arguments[-1][0]]

    def do_constant_folding(self, *_: Any) -> bool:
        """Return False: a compilation would wait for the other workers."""
        return False


def _make_all_reduce(op: str) -> Callable[..., Any]:
    """Return a function of an array that returns its reduction over all workers."""

    def all_reduce(src: Any, dest: Any = None, inplace: bool = False, worker: Worker | None = None) -> Any:
        """Return the reduction over all workers; ``dest`` has to have the type of ``src``, ``inplace`` is ignored."""
        return AllReduce(op, worker)(src, dest)

    return all_reduce


AllReduceSum, AllReduceProd, AllReduceMax, AllReduceMin = map(_make_all_reduce, ("sum", "prod", "max", "min"))


if library == "pytensor":
    from synkhronos.lowering.numpy_op import call_ordered_callback, register_lowering

    @register_lowering(AllReduce)
    def _lower_all_reduce(op: AllReduce, src: Any) -> Any:
        return call_ordered_callback(lambda array: np.asarray(op.worker.all_reduce(array, op.op)), src)
