"""Modules of Theano that only re-export names of other modules: the import statements that they consist of."""

from __future__ import annotations

#: Statements by the module's name.
RE_EXPORTS: dict[str, list[str]] = {
    "theano.compat": ["from collections import OrderedDict"],
    "theano.compile.io": ["from pytensor.compile.io import *", "from synkhronos.compat.functions import In"],
    "theano.compile.nanguardmode": ["from pytensor.compile.debug.nanguardmode import *"],
    "theano.compile.ops": [
        "from pytensor.compile.ops import *",
        "from pytensor.tensor.shape import Shape, Shape_i, SpecifyShape, shape, specify_shape",
    ],
    "theano.compile.sharedvalue": ["from pytensor.compile.sharedvalue import *"],
    "theano.configparser": ["from theano import change_flags, config"],
    "theano.ifelse": [
        "try: from pytensor.conditional.op import IfElse, ifelse",
        "except ImportError: from pytensor.ifelse import IfElse, ifelse",  # older than PyTensor 3.3
    ],
    "theano.misc": [],
    "theano.printing": ["from pytensor.printing import *"],
    "theano.sandbox": [],
    "theano.sandbox.cuda.basic_ops": [
        "from theano.gpuarray.basic_ops import as_gpuarray_variable as as_cuda_ndarray_variable",
        "from theano.gpuarray.basic_ops import gpu_contiguous, host_from_gpu",
        "gpu_from_host = as_cuda_ndarray_variable",
    ],
    "theano.sandbox.cuda.dnn": ["from theano.gpuarray.dnn import dnn_available, dnn_conv, dnn_pool"],
    "theano.sandbox.rng_mrg": ["from synkhronos.compat.random_streams import RandomStreams as MRG_RandomStreams"],
    "theano.scalar": ["from pytensor.scalar import *", "from theano.scalar.basic import *"],
    "theano.scalar.basic": ["from pytensor.scalar.basic import *"],
    "theano.sparse": [
        "from pytensor.sparse import *",
        "from pytensor.sparse.type import SparseTensorType as SparseType",
        "from pytensor.sparse.variable import SparseVariable",
        "enable_sparse = True",
    ],
    "theano.tensor.elemwise": ["from pytensor.tensor.elemwise import *"],
    "theano.tensor.extra_ops": [
        "from pytensor.tensor.extra_ops import *",
        "from pytensor.tensor.extra_ops import CumOp, Repeat, Unique, to_one_hot",
    ],
    "theano.tensor.fft": ["from pytensor.tensor.fft import irfft, rfft"],
    "theano.tensor.shared_randomstreams": [
        "from pytensor.tensor.random.variable import RandomGeneratorSharedVariable as RandomStateSharedVariable",
        "from synkhronos.compat.random_streams import RandomStreams",
    ],
    "theano.tensor.sharedvar": ["from pytensor.tensor.sharedvar import *"],
    "theano.tensor.signal": ["from theano.tensor.signal import pool"],
    "theano.tensor.sort": [
        "from pytensor.tensor.sort import argsort, sort",
        "from theano.tensor.basic import argtopk, topk, topk_and_argtopk",
    ],
    "theano.tensor.type": ["from pytensor.tensor.type import *"],
}
