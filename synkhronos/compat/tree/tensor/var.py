"""The module ``theano.tensor.var`` on PyTensor: classes of variables.

The truth value of a variable is True, as in Theano, so that ``if not input:`` tests whether there is one.
"""

from typing import Any

from pytensor.compile import SharedVariable
from pytensor.graph.basic import Constant
from pytensor.scalar.basic import GE, GT, LE, LT
from pytensor.tensor.variable import TensorConstant, _tensor_py_operators
from pytensor.tensor.variable import TensorVariable as _TensorVariable


class _SymbolicOnly(type):
    """In PyTensor shared variables and constants are tensor variables too; programs tell them apart by their class."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _TensorVariable) and not isinstance(instance, SharedVariable | Constant)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, _TensorVariable) and not issubclass(subclass, SharedVariable | Constant)


class TensorVariable(metaclass=_SymbolicOnly):
    """Class of inputs and expressions, for ``isinstance``.

    Examples
    --------
    >>> isinstance(T.matrix(), T.TensorVariable), isinstance(theano.shared(1.0), T.TensorVariable)
    (True, False)
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make one of PyTensor's."""
        return _TensorVariable(*args, **kwargs)


def _is_true(self: Any) -> bool:
    """Return True, but for comparisons: Python makes ``(a < b) and (b < c)`` of ``a < b < c``."""
    op = getattr(self.owner, "op", None)
    if isinstance(getattr(op, "scalar_op", None), LT | LE | GT | GE):
        raise TypeError(
            "a comparison of variables is neither true nor false before it is computed: use T.switch or theano.ifelse, "
            "and (a < b) & (b < c) in the place of a < b < c"
        )
    return True


_tensor_py_operators.__bool__ = _is_true
