"""The module ``theano.gpuarray``, on PyTensor: what programs ask before they use its Ops, which are not there."""

from typing import Any

import pytensor
from theano.compile import shared as gpuarray_shared_constructor
from theano.gpuarray import basic_ops, dnn

#: Whether Theano computes on a GPU.
pygpu_activated = False


def use(device: str, *args: Any, **kwargs: Any) -> None:
    """Compute on GPUs from now on, as the flag ``device=cuda`` asks for: functions that name no mode get JAX mode.

    Which GPU a rank has is for `synkhronos.fork` to say.

    Parameters
    ----------
    device : str
        ``"cuda"``, ``"gpu"`` or ``"opencl"``, a number behind it dropped; what else is asked for changes nothing.
    *args, **kwargs
        Dropped.
    """
    if device.startswith(("cuda", "gpu", "opencl")):
        pytensor.config.mode = "JAX"
