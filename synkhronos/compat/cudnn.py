"""Theano's functions for cuDNN, implemented by convolution and pooling that run on any device."""

from __future__ import annotations

import sys
from typing import Any


def dnn_conv(
    img: Any,
    kerns: Any,
    border_mode: Any = "valid",
    subsample: Any = (1, 1),
    dilation: Any = (1, 1),
    conv_mode: str = "conv",
    direction_hint: str | None = None,
    workmem: str | None = None,
    algo: str | None = None,
    precision: str | None = None,
    num_groups: int = 1,
) -> Any:
    """Return the convolution of images (batch, channels, *spatial) with filters (outputs, channels, *spatial).

    Arguments that select cuDNN's algorithm are ignored.
    """
    from theano.tensor.nnet import conv2d

    if conv_mode not in ("conv", "cross"):
        raise ValueError(f"conv_mode: expected 'conv' or 'cross', got {conv_mode!r}")
    return conv2d(
        img,
        kerns,
        border_mode=border_mode,
        subsample=subsample,
        filter_flip=conv_mode == "conv",
        filter_dilation=dilation,
        num_groups=num_groups,
    )


def dnn_pool(img: Any, ws: Any, stride: Any = None, mode: str = "max", pad: Any = None) -> Any:
    """Return images (batch, channels, *spatial) pooled by windows of shape ``ws``.  The default stride is 1.

    Windows that extend beyond the border are omitted.
    """
    from theano.tensor.signal.pool import pool_2d, pool_3d

    return (pool_2d if len(ws) == 2 else pool_3d)(
        img,
        ws=tuple(ws),
        ignore_border=True,
        stride=(1,) * len(ws) if stride is None else tuple(stride),
        pad=(0,) * len(ws) if pad is None else tuple(pad),
        mode={"max_deterministic": "max", "average": "average_inc_pad"}.get(mode, mode),
    )


def patch_dnn_module(dnn: Any) -> None:
    """Patch Theano's ``dnn_conv`` and ``dnn_pool`` to call the functions of this module if there is no cuDNN."""
    for replacement in (dnn_conv, dnn_pool):
        setattr(
            dnn, replacement.__name__, _fall_back_without_cudnn(dnn, getattr(dnn, replacement.__name__), replacement)
        )


def _fall_back_without_cudnn(dnn: Any, original: Any, replacement: Any) -> Any:
    """Return a function that calls ``original`` if there is cuDNN at the time of the call, else ``replacement``."""

    def function(*args: Any, **kwargs: Any) -> Any:
        has_cudnn = sys.modules["theano.gpuarray"].pygpu_activated and dnn.dnn_available(None)
        return (original if has_cudnn else replacement)(*args, **kwargs)

    function.__name__, function.__doc__ = original.__name__, original.__doc__
    return function
