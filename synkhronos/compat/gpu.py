"""What becomes of Theano's two GPU backends on PyTensor: ``theano.gpuarray`` and ``theano.sandbox.cuda``.

`use`
    Asks for JAX mode, as the flag ``device=cuda`` does.
`same`
    What moves an array between host and GPU: nothing has to.
`dnn_available`
    False: there is none of Theano's own code for cuDNN; XLA calls cuDNN by itself.

Programs import these modules to choose a device, or to ask whether there is cuDNN and go another way.
"""

from __future__ import annotations

from typing import Any

import pytensor
import pytensor.tensor as pt

__all__ = ["dnn_available", "same", "use"]


def use(device: str, *args: Any, **kwargs: Any) -> None:
    """Compute on GPUs from now on: functions that name no mode are compiled in JAX mode.

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


def same(x: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the array itself, as a variable."""
    return pt.as_tensor_variable(x)


def dnn_available(*args: Any) -> bool:
    """Return False."""
    return False


dnn_available.msg = "PyTensor's JAX mode uses cuDNN by itself"  # type: ignore[attr-defined]
