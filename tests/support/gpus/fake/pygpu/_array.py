"""The array with NumPy's operators."""

import numpy as np

from pygpu.gpuarray import GpuArray


class ndgpuarray(np.lib.mixins.NDArrayOperatorsMixin, GpuArray):  # noqa: N801 - pygpu's name
    def __array_ufunc__(self, ufunc, method, *inputs, out=None):
        values = [value._memory if isinstance(value, GpuArray) else value for value in inputs]
        if out is None:
            return ndgpuarray(np.asarray(getattr(ufunc, method)(*values)), self.context)
        ufunc(*values, out=out[0]._memory)
        return out[0]
