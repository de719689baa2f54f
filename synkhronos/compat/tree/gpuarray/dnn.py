"""The module ``theano.gpuarray.dnn``, on PyTensor: it says that Theano's own code for cuDNN is not available."""

from typing import Any


def dnn_available(*args: Any) -> bool:
    """Return False."""
    return False


dnn_available.msg = "PyTensor's JAX mode uses cuDNN by itself"  # type: ignore[attr-defined]
dnn_present = dnn_available
