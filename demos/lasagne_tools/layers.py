"""Layers that Lasagne 0.1 lacks, or implements with more memory traffic."""

from __future__ import annotations

from typing import Any

from lasagne_tools.library import T, lasagne

__all__ = ["ConvLayer", "MeanLayer", "UpscaleLayer"]


class ConvLayer(lasagne.layers.Conv2DLayer):
    """Convolution with padding and groups; Lasagne 0.1 pads by copying the input into a larger array.

    Each of the `groups` of filters reads one of as many groups of channels.
    """

    # The gradient of Lasagne's rectifier needs its input; that of T.nnet.relu on PyTensor needs only its output, which
    # the next layer keeps anyway.
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
    """Mean of each channel; Lasagne 0.1 reshapes its input, which XLA cannot do for symbolic lengths."""

    def get_output_for(self, input: Any, **kwargs: Any) -> Any:
        """Take the mean over height and width."""
        return input.mean(axis=(2, 3))


class UpscaleLayer(lasagne.layers.Layer):
    """Upsample images by an integer factor, by repeating each pixel."""

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
