"""Stands for pygpu's arrays: host memory for the GPU's, of which NumPy reads a copy."""

import numpy as np

_CODES = {name: code for code, name in enumerate(["bool", *(np.dtype(kind).name for kind in "bBhHiIlLefd")])}


class GpuArrayException(Exception):
    pass


class GpuContext:
    pass


def dtype_to_typecode(dtype):
    if str(np.dtype(dtype)) not in _CODES:
        raise GpuArrayException(f"no such dtype: {dtype}")
    return _CODES[str(np.dtype(dtype))]


class GpuArray:
    """An array; like the real one it has no nbytes."""

    def __init__(self, memory, context):
        self._memory, self.context = memory, context

    def __array__(self, dtype=None):
        return np.array(self._memory, dtype)

    def __len__(self):
        return len(self._memory)

    def __getitem__(self, key):
        return type(self)(self._memory[key], self.context)

    gpudata = property(lambda self: self._memory.ctypes.data)
    typecode = property(lambda self: dtype_to_typecode(self.dtype))
    shape, strides, dtype, ndim, size, flags = (
        property(lambda self, name=name: getattr(self._memory, name))
        for name in ("shape", "strides", "dtype", "ndim", "size", "flags")
    )

    def sync(self):
        pass

    def view(self, cls=None):
        return (cls or GpuArray)(self._memory, self.context)

    def copy(self, order="C"):
        return type(self)(self._memory.copy(order), self.context)

    def astype(self, dtype, order="A", copy=True):
        return type(self)(self._memory.astype(dtype), self.context) if copy or dtype != self.dtype else self

    def reshape(self, shape, order="C"):
        return type(self)(self._memory.reshape(shape), self.context)

    def write(self, values):
        self._memory[...] = values


def array(value, dtype=None, copy=True, order="C", ndmin=0, context=None, cls=None):
    if isinstance(value, GpuArray):
        value, context = value._memory, context or value.context
    assert context is not None, "there is no default context"
    return (cls or GpuArray)(np.array(value, dtype, copy=copy, order=order, ndmin=ndmin), context)


def empty(shape, dtype="float64", order="C", context=None, cls=None):
    assert context is not None, "there is no default context"
    return (cls or GpuArray)(np.full(shape, 85).astype(dtype), context)  # real memory is not initialized


def concatenate(parts, axis=0, context=None):
    return GpuArray(np.concatenate([part._memory for part in parts], axis), context or parts[0].context)
