"""The module ``theano.sandbox.cuda.basic_ops``, on PyTensor: transfers that return their argument."""

from theano.gpuarray.basic_ops import as_gpuarray_variable as as_cuda_ndarray_variable
from theano.gpuarray.basic_ops import gpu_contiguous, host_from_gpu

gpu_from_host = as_cuda_ndarray_variable
