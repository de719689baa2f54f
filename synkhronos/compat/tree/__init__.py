"""The module ``theano``, on PyTensor.

Programs see it under that name.  Functions whose arguments PyTensor has changed are here; the others are PyTensor's.
"""

from typing import Any

import pytensor
import pytensor.compile.mode
from pytensor import Mode, OpFromGraph, Out, get_mode
from pytensor.compile import ProfileStats, SharedVariable
from pytensor.gradient import Lop, Rop
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.type import Type
from pytensor.printing import debugprint, pp

from synkhronos.compat.flags import Config

#: The version of Theano whose names these are.
__version__ = "1.0.5"
#: Tells this module from Theano itself.
__served_on__ = "pytensor"

config = Config(pytensor.config)

from theano import compile, gof, gradient, ifelse, misc, printing, sandbox, scalar, tensor, updates  # noqa: E402
from theano.compile import In, function, shared  # noqa: E402
from theano.gof import Op, generic  # noqa: E402
from theano.gradient import grad, subgraph_grad  # noqa: E402
from theano.scan_module import foldl, foldr, map, reduce, scan  # noqa: E402
from theano.scan_module.scan_utils import clone  # noqa: E402
from theano.updates import OrderedUpdates  # noqa: E402

__all__ = [
    "Apply",
    "Constant",
    "FunctionGraph",
    "In",
    "Lop",
    "Mode",
    "Op",
    "OpFromGraph",
    "OrderedUpdates",
    "Out",
    "Param",
    "ProfileStats",
    "Rop",
    "SharedVariable",
    "Type",
    "Variable",
    "clone",
    "compile",
    "config",
    "debugprint",
    "dot",
    "foldl",
    "foldr",
    "function",
    "generic",
    "get_mode",
    "get_scalar_constant_value",
    "gof",
    "grad",
    "gradient",
    "ifelse",
    "map",
    "misc",
    "pp",
    "printing",
    "reduce",
    "sandbox",
    "scalar",
    "scan",
    "shared",
    "subgraph_grad",
    "tensor",
    "updates",
]

Param = In
predefined_modes = pytensor.compile.mode.predefined_modes
predefined_linkers = pytensor.compile.mode.predefined_linkers
get_scalar_constant_value = tensor.get_scalar_constant_value


def dot(left: Any, right: Any) -> Any:
    """Multiply matrices, or vectors, or what has a ``__dot__``."""
    return tensor.dot(left, right)
