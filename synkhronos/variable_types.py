"""Types of the objects of graph libraries and of arrays of devices in signatures, by their role.

They are aliases of `Any`: PyTensor and Theano have no common base classes, and may not be imported where a type is
checked.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

#: Symbolic variable.
Variable: TypeAlias = Any
#: Shared variable: a symbolic variable with a value.
SharedVariable: TypeAlias = Any
#: One variable, or several.
Variables: TypeAlias = Variable | Sequence[Variable]
#: One shared variable, or several.
SharedVariables: TypeAlias = SharedVariable | Sequence[SharedVariable]
#: Apply node of a graph: an operation with its input and output variables.
Node: TypeAlias = Any
#: Operation of a graph.
Op: TypeAlias = Any
#: Graph of the graph library while it is rewritten or compiled.
FunctionGraph: TypeAlias = Any
#: Compilation mode of the graph library, or its name.
Mode: TypeAlias = Any
#: Function that the graph library compiled.
CompiledFunction: TypeAlias = Any
#: Number, or symbolic scalar.
Scalar: TypeAlias = float | Variable
#: Array of a device: of NumPy, JAX or pygpu.
Array: TypeAlias = Any
