"""The module ``theano.gpuarray.basic_ops``, on PyTensor: arrays need not be moved."""

from synkhronos.compat.gpu import same as as_gpuarray_variable
from synkhronos.compat.gpu import same as gpu_contiguous
from synkhronos.compat.gpu import same as host_from_gpu

__all__ = ["as_gpuarray_variable", "gpu_contiguous", "host_from_gpu"]
