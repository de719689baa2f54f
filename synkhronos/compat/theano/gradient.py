"""The module ``theano.gradient``, on PyTensor."""

from typing import Any

from pytensor.gradient import *
from pytensor.gradient import zero_grad as consider_constant


def format_as(use_list: bool, use_tuple: bool, outputs: Any) -> Any:
    """Return the outputs as a list, as a tuple, or if neither is asked for, the first output."""
    if use_list:
        return list(outputs)
    if use_tuple:
        return tuple(outputs)
    return outputs[0] if isinstance(outputs, list | tuple) else outputs
