"""Symbolic variables, with the arguments as Theano had them: a dtype may come without its keyword.

`scalar`, `vector`, `matrix`, `row`, `col`, `tensor3`, `tensor4`, `tensor5`, `tensor6`, `tensor7`
    A variable of a number of dimensions.
`tensor`
    A variable of a pattern of broadcastable dimensions.
"""

from collections.abc import Callable, Iterable
from typing import Any

import pytensor.tensor as pt
from pytensor.tensor.type import TensorType

__all__ = ["col", "matrix", "row", "scalar", "tensor", "tensor3", "tensor4", "tensor5", "tensor6", "tensor7", "vector"]


def _constructor(name: str) -> Callable[..., Any]:
    make = getattr(pt, name)

    def construct(name: str | None = None, dtype: Any = None, **kwargs: Any) -> Any:
        return make(name, dtype=dtype, **kwargs)

    construct.__name__ = construct.__qualname__ = name
    construct.__doc__ = f"Return a symbolic {name}: a name and a dtype, floatX by default."
    return construct


scalar = _constructor("scalar")
vector = _constructor("vector")
matrix = _constructor("matrix")
row = _constructor("row")
col = _constructor("col")
tensor3 = _constructor("tensor3")
tensor4 = _constructor("tensor4")
tensor5 = _constructor("tensor5")
tensor6 = _constructor("tensor6")
tensor7 = _constructor("tensor7")


def tensor(dtype: Any = None, broadcastable: Iterable[bool] | None = None, name: Any = None, **kwargs: Any) -> Any:
    """Return a symbolic variable.

    Parameters
    ----------
    dtype : str
        Or the name, with the dtype as the keyword that is left, as PyTensor has it.
    broadcastable : sequence of bool
        A dimension for each: whether its length is one and stands for any.
    name : str, optional
    **kwargs
        ``shape``, as PyTensor has it.

    Returns
    -------
    variable

    Examples
    --------
    >>> T.tensor("float32", (False, True), "x").type.shape
    (None, 1)
    """
    if broadcastable is None:
        return pt.tensor(name, dtype=dtype, **kwargs)
    return TensorType(dtype, shape=tuple(1 if b else None for b in broadcastable))(name)
