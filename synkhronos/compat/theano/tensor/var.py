"""The module ``theano.tensor.var``, on PyTensor: classes of variables.

The truth value of a variable is True, as in Theano, so that ``if not input:`` tests whether there is one.
"""

from typing import Any

from pytensor.compile import SharedVariable
from pytensor.graph.basic import Constant
from pytensor.scalar.basic import GE, GT, LE, LT
from pytensor.tensor.variable import TensorConstant, _tensor_py_operators
from pytensor.tensor.variable import TensorVariable as _TensorVariable


class _SymbolicOnly(type):
    """Metaclass that excludes shared variables and constants, which are tensor variables in PyTensor."""

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
        """Return a variable of PyTensor."""
        return _TensorVariable(*args, **kwargs)


def _is_true(self: Any) -> bool:
    """Return True.  Raise TypeError for comparisons, since Python evaluates ``a < b < c`` as ``a < b and b < c``."""
    op = getattr(self.owner, "op", None)
    if isinstance(getattr(op, "scalar_op", None), LT | LE | GT | GE):
        raise TypeError(
            "a symbolic comparison has no truth value: use T.switch or theano.ifelse, and (a < b) & (b < c) instead of "
            "a < b < c"
        )
    return True


_tensor_py_operators.__bool__ = _is_true
