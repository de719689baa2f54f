"""The module ``theano.gpuarray.dnn``, on PyTensor: cuDNN's functions, computed by XLA or NumPy."""

from typing import Any

from synkhronos.compat.cudnn import dnn_conv, dnn_pool


def dnn_available(*args: Any) -> bool:
    """Return False."""
    return False


dnn_available.msg = "PyTensor's JAX mode uses cuDNN by itself"  # type: ignore[attr-defined]
dnn_present = dnn_available
