"""The module ``theano``, on PyTensor.

Its modules re-export PyTensor's names, and define functions whose names or arguments differ from Theano's.  Modules
that only re-export names have no file here: `synkhronos.compat.re_exports` defines them.
"""

from typing import Any

import numpy as np
import pytensor

from synkhronos.compat.flags import Config

#: Version of Theano whose interface this is.
__version__ = "1.0.5"
#: Marks this module as not being Theano itself.
__served_on__ = "pytensor"

config = Config(pytensor.config)
change_flags = config.change_flags

from theano import compile, gof, gradient, ifelse, misc, printing, sandbox, scalar, tensor, updates
from theano.compile import (
    In,
    Mode,
    OpFromGraph,
    Out,
    Param,
    ProfileStats,
    SharedVariable,
    function,
    get_mode,
    predefined_linkers,
    predefined_modes,
    shared,
)
from theano.gof import Apply, Constant, FunctionGraph, Op, Type, Variable, generic
from theano.gradient import Lop, Rop, grad, subgraph_grad
from theano.printing import debugprint, pp, pprint
from theano.scan_module import foldl, foldr, map, reduce, scan
from theano.scan_module.scan_utils import clone
from theano.tensor import dot, get_scalar_constant_value
from theano.updates import OrderedUpdates


def _asarray(a: Any, dtype: Any, order: Any = None) -> np.ndarray:
    """Convert to an array of a dtype, which may be ``"floatX"``."""
    return np.asarray(a, config.floatX if dtype == "floatX" else dtype, order)
