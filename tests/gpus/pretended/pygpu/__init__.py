"""Stands for pygpu's arrays: host memory for the GPU's."""

import numpy as np

from pygpu._array import ndgpuarray


def empty(shape, dtype, context):
    return np.empty(shape, dtype).view(ndgpuarray)


def array(value, context):
    return np.array(value, order="C").view(ndgpuarray)


def concatenate(parts, context):
    return np.concatenate(parts).view(ndgpuarray)
