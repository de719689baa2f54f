"""The module ``theano.gof``, on PyTensor: graphs and their nodes."""

import inspect
from typing import Any

import pytensor.graph.op
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.features import Feature
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.type import Type
from pytensor.graph.utils import InconsistencyError, MethodNotDefined, MissingInputError
from pytensor.link.c.params_type import ParamsType
from pytensor.link.c.type import EnumList, Generic, generic


class Op(pytensor.graph.op.Op):
    """Base class of a script's own Ops.  ``infer_shape(self, node, shapes)`` works in each version of PyTensor."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Wrap ``infer_shape``, which some versions of PyTensor call with a graph before the node."""
        method: Any = cls.__dict__.get("infer_shape")
        if method is not None and len(inspect.signature(method).parameters) == 3:

            def infer_shape(self: Any, *args: Any) -> Any:
                return method(self, *args[-2:])

            cls.infer_shape = infer_shape
        super().__init_subclass__(**kwargs)


from theano.gof import graph
