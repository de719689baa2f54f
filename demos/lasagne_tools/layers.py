"""Layers that Lasagne 0.1 does not have, or not in this way.

`ConvLayer`
    A convolution that pads by itself, and may have groups.
`MeanLayer`
    The mean of each channel.
`UpscaleLayer`
    Larger images.
"""

from __future__ import annotations

from typing import Any

from lasagne_tools.library import T, lasagne

__all__ = ["ConvLayer", "MeanLayer", "UpscaleLayer"]


class ConvLayer(lasagne.layers.Conv2DLayer):
    """A convolution that pads by itself: Lasagne 0.1 copies its input into a larger array of zeros for that.

    Parameters
    ----------
    *args, **kwargs
        As for Lasagne's.
    groups : int
        Each of so many parts of the filters sees its own part of the channels alone.
    """

    # Lasagne's own rectifier has a gradient that needs its input; Theano's, on PyTensor, is content with its output,
    # which the next layer keeps anyway.
    def __init__(self, *args: Any, groups: int = 1, nonlinearity: Any = T.nnet.relu, **kwargs: Any) -> None:
        self.groups = groups
        super().__init__(*args, nonlinearity=nonlinearity, **kwargs)

    def get_W_shape(self) -> tuple[int, ...]:  # noqa: N802 - Lasagne's name
        """Return the weights' shape."""
        return (self.num_filters, self.input_shape[1] // self.groups, *self.filter_size)

    def get_output_for(self, input: Any, **kwargs: Any) -> Any:
        """Convolve."""
        groups = {"num_groups": self.groups} if self.groups > 1 else {}
        convolved = self.convolution(
            input,
            self.W,
            input_shape=self.input_shape,
            filter_shape=self.get_W_shape(),
            border_mode=self.pad,
            subsample=self.stride,
            **groups,
        )
        if self.b is not None:
            convolved = convolved + self.b.dimshuffle("x", 0, "x", "x")
        return self.nonlinearity(convolved)


class MeanLayer(lasagne.layers.GlobalPoolLayer):
    """The mean of each channel: Lasagne 0.1 reshapes its input for that, which XLA can't where lengths are symbols."""

    def get_output_for(self, input: Any, **kwargs: Any) -> Any:
        """Take the mean over height and width."""
        return input.mean(axis=(2, 3))


class UpscaleLayer(lasagne.layers.Layer):
    """Images of so many times the height and width: each pixel becomes a square."""

    def __init__(self, incoming: Any, factor: int, **kwargs: Any) -> None:
        super().__init__(incoming, **kwargs)
        self.factor = factor

    def get_output_shape_for(self, input_shape: Any) -> tuple[Any, ...]:
        """Return the output's shape."""
        rows, channels, height, width = input_shape
        return (rows, channels, self.factor * height, self.factor * width)

    def get_output_for(self, input: Any, **kwargs: Any) -> Any:
        """Repeat each pixel."""
        return T.extra_ops.repeat(T.extra_ops.repeat(input, self.factor, axis=2), self.factor, axis=3)
