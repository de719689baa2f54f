"""Replaces pygpu: Theano's arrays on GPUs, without its kernels."""

from pygpu.gpuarray import array, concatenate, empty

__all__ = ["array", "concatenate", "empty"]
