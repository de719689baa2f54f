"""The module ``theano.tensor``, on PyTensor.

It has all names of ``pytensor.tensor``.  Those whose arguments have changed since Theano are in ``basic`` and in
``constructors``, here under their old signatures, with the names that PyTensor has dropped.
"""

from types import ModuleType
from typing import Any

import pytensor.tensor as _pytensor

# Everything first: what follows replaces the names that differ.
globals().update(
    {
        name: getattr(_pytensor, name)
        for name in dir(_pytensor)
        if not name.startswith("_") and not isinstance(getattr(_pytensor, name), ModuleType)
    }
)

from pytensor.gradient import (  # noqa: E402, F401
    DisconnectedType,
    Lop,
    Rop,
    grad,
    grad_not_implemented,
    grad_undefined,
    hessian,
    jacobian,
    numeric_grad,
    verify_grad,
)
from pytensor.gradient import zero_grad as consider_constant  # noqa: E402, F401
from pytensor.graph.basic import Apply  # noqa: E402, F401
from pytensor.tensor.exceptions import NotScalarConstantError, ShapeError  # noqa: E402, F401
from pytensor.tensor.sharedvar import TensorSharedVariable  # noqa: E402, F401
from pytensor.tensor.type import (  # noqa: E402, F401
    all_dtypes,
    complex_dtypes,
    continuous_dtypes,
    discrete_dtypes,
    float_dtypes,
    int_dtypes,
    integer_dtypes,
    uint_dtypes,
)
from theano import config  # noqa: E402, F401
from theano.tensor.basic import *  # noqa: E402, F403
from theano.tensor.constructors import *  # noqa: E402, F403
from theano.tensor.elemwise import CAReduce, DimShuffle, Elemwise  # noqa: E402, F401
from theano.tensor.subtensor import (  # noqa: E402, F401
    AdvancedIncSubtensor,
    AdvancedIncSubtensor1,
    AdvancedSubtensor,
    AdvancedSubtensor1,
    IncSubtensor,
    Subtensor,
)

from theano.tensor import (  # noqa: E402, F401  # isort: skip
    basic,
    elemwise,
    extra_ops,
    nlinalg,
    nnet,
    shared_randomstreams,
    sharedvar,
    slinalg,
    sort as _sort_module,
    subtensor,
    type,
    var,
    xlogx,
)
from theano.tensor.basic import sort  # noqa: E402, F401  # the module has the function's name
from theano.tensor.shared_randomstreams import RandomStreams  # noqa: E402, F401


def __getattr__(name: str) -> Any:
    value = getattr(_pytensor, name)
    if isinstance(value, ModuleType):
        raise AttributeError(name)
    return value
