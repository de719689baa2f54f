"""The module ``theano.sandbox.cuda.basic_ops``, on PyTensor: arrays need not be moved."""

from synkhronos.compat.gpu import same as as_cuda_ndarray_variable
from synkhronos.compat.gpu import same as gpu_contiguous
from synkhronos.compat.gpu import same as gpu_from_host
from synkhronos.compat.gpu import same as host_from_gpu

__all__ = ["as_cuda_ndarray_variable", "gpu_contiguous", "gpu_from_host", "host_from_gpu"]
