"""Stands for pygpu: Theano's arrays on GPUs, without what computes with them there."""

from pygpu.gpuarray import array, concatenate, empty

__all__ = ["array", "concatenate", "empty"]
