"""The module ``theano.tensor.nnet.conv3d2d``, which Keras 1 imports: 3D convolution with the time axis second."""

from typing import Any

from theano.tensor.nnet.abstract_conv import conv3d as _conv3d

__all__ = ["conv3d"]

_TIME_AND_CHANNELS_SWAPPED = (0, 2, 1, 3, 4)


def conv3d(
    signals: Any, filters: Any, signals_shape: Any = None, filters_shape: Any = None, border_mode: Any = "valid"
) -> Any:
    """Convolve signals (batch, time, channel, row, column) with filters (filter, time, channel, row, column).

    The result has the axes of the signals.
    """
    shapes = [
        None if shape is None else tuple(shape[axis] for axis in _TIME_AND_CHANNELS_SWAPPED)
        for shape in (signals_shape, filters_shape)
    ]
    signals, filters = (variable.dimshuffle(_TIME_AND_CHANNELS_SWAPPED) for variable in (signals, filters))
    return _conv3d(signals, filters, *shapes, border_mode=border_mode).dimshuffle(_TIME_AND_CHANNELS_SWAPPED)
