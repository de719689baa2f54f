"""The module ``theano.gpuarray``, on PyTensor: checks for a GPU, without the Ops."""

from typing import Any

import pytensor
from theano.compile import shared as gpuarray_shared_constructor
from theano.gpuarray import basic_ops, dnn

#: Whether Theano's own GPU back end is active.
pygpu_activated = False


def use(device: str, *args: Any, **kwargs: Any) -> None:
    """Make JAX mode the default, if ``device`` begins with cuda, gpu or opencl.  Ignore all else.

    `synkhronos.fork` assigns a GPU to each rank, so that the number of the device has no effect.
    """
    if device.startswith(("cuda", "gpu", "opencl")):
        pytensor.config.mode = "JAX"
