"""Types of both graph libraries' objects in signatures, by their role.

They are aliases of `Any`: PyTensor and Theano have no common base classes, and may not be imported where a type is
checked.
"""

from typing import Any, TypeAlias

#: Symbolic variable.
Variable: TypeAlias = Any
#: Shared variable: a symbolic variable with a value.
SharedVariable: TypeAlias = Any
#: Number, or symbolic scalar.
Scalar: TypeAlias = float | Variable
#: Array of a device: of NumPy, JAX or pygpu.
Array: TypeAlias = Any
