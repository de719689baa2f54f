"""The module ``theano.tensor.fft``, on PyTensor."""

from pytensor.tensor.fft import irfft, rfft
