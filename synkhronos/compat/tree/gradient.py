"""The module ``theano.gradient``, on PyTensor."""

from typing import Any

from pytensor.gradient import (
    DisconnectedInputError,
    DisconnectedType,
    GradientError,
    Lop,
    NullTypeGradError,
    Rop,
    disconnected_grad,
    grad,
    grad_clip,
    grad_not_implemented,
    grad_scale,
    grad_undefined,
    hessian,
    jacobian,
    numeric_grad,
    subgraph_grad,
    undefined_grad,
    verify_grad,
    zero_grad,
)
from pytensor.gradient import (
    as_list_or_tuple as _as_list_or_tuple,  # noqa: F401
)

__all__ = [
    "DisconnectedInputError",
    "DisconnectedType",
    "GradientError",
    "Lop",
    "NullTypeGradError",
    "Rop",
    "consider_constant",
    "disconnected_grad",
    "format_as",
    "grad",
    "grad_clip",
    "grad_not_implemented",
    "grad_scale",
    "grad_undefined",
    "hessian",
    "jacobian",
    "numeric_grad",
    "subgraph_grad",
    "undefined_grad",
    "verify_grad",
    "zero_grad",
]

consider_constant = zero_grad


def format_as(use_list: bool, use_tuple: bool, outputs: Any) -> Any:
    """Return the outputs as a list, as a tuple, or the only one alone."""
    if use_list:
        return list(outputs)
    if use_tuple:
        return tuple(outputs)
    return outputs[0] if isinstance(outputs, list | tuple) else outputs
