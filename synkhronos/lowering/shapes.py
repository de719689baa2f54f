"""Lowerings to JAX that keep lengths as numbers while a function is traced.

XLA compiles for fixed shapes, so shapes are tuples of numbers while a function is traced.  PyTensor's lowerings compute
with these numbers in JAX.  The results are traced values, which neither a reshape nor a slice accepts, but scripts
written for Theano often reshape to computed shapes.  The lowerings here compute integers that are known during tracing
with NumPy, and call PyTensor's lowerings for all others:

    lowering of an Op on integers:    all inputs known?   yes: NumPy       no: PyTensor's lowering
    lowering of an Op with a shape:   shape known?        yes: compute     no: NotImplementedError with `LENGTH_HINT`
    lowering of indexing by slices:   bounds known?       yes: PyTensor's  no: constant or given length, traced start

Lengths that depend on the values of a function's inputs become static arguments in `lengths`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NoReturn

import numpy as np
from pytensor.graph.basic import Apply, Constant
from pytensor.graph.fg import FunctionGraph
from pytensor.printing import debugprint
from pytensor.raise_op import CheckAndRaise
from pytensor.scalar.basic import AND, OR, Add, Composite, Mul, ScalarMaximum, ScalarMinimum, ScalarOp, Switch, upcast
from pytensor.scalar.math import PolyGamma
from pytensor.scan.op import Scan
from pytensor.tensor import subtensor
from pytensor.tensor.basic import (
    Alloc,
    AllocEmpty,
    ARange,
    Eye,
    Join,
    MakeVector,
    Nonzero,
    ScalarFromTensor,
    Split,
    TensorFromScalar,
)
from pytensor.tensor.blas import BatchedDot
from pytensor.tensor.elemwise import CAReduce, DimShuffle, Elemwise
from pytensor.tensor.extra_ops import Bartlett, Repeat, Unique
from pytensor.tensor.math import Dot, ProdWithoutZeros
from pytensor.tensor.random.op import RandomVariable
from pytensor.tensor.shape import Reshape
from pytensor.tensor.subtensor import AdvancedIncSubtensor, AdvancedSubtensor, IncSubtensor, Subtensor

from synkhronos.lowering.dtypes import lower_graph
from synkhronos.lowering.lengths import (
    FixedLengthSubtensor,
    select_shape_inputs,
    split_indexing,
    to_number_or_array,
    to_python_function,
)
from synkhronos.lowering.polynomial import Polynomial, find_constant_extent, to_polynomial
from synkhronos.variable_types import Array, Node, Op, Variable

try:
    from pytensor.conditional.op import IfElse
except ImportError:  # older than PyTensor 3.3
    from pytensor.ifelse import IfElse

#: Maximal number of elements of a shape; larger arrays are data.
_MAX_SHAPE_SIZE = 64

#: Advice at the end of an error's message.
LENGTH_HINT = (
    "In JAX mode lengths may depend on shapes, and on inputs and shared variables that are single integers. Pass the "
    "length as such an input; take rows by x[start + arange(length)]; or use another mode for this function"
)

#: A function of arrays.
ArrayFunction = Callable[..., Any]


@cache
def register_shape_lowerings() -> None:
    """Register the lowerings with PyTensor, once in each process."""
    from pytensor.link.jax.dispatch import jax_funcify

    jax_funcify.register(ProdWithoutZeros)(_lower_prod_without_zeros)
    jax_funcify.register(ScalarOp)(_refuse_missing_function(jax_funcify.dispatch(ScalarOp)))
    jax_funcify.register(object)(_refuse_op)
    for op_class in (Elemwise, Dot, BatchedDot, Join):
        jax_funcify.register(op_class)(_compute_in_graph_dtype(jax_funcify.dispatch(op_class)))
    jax_funcify.register(CAReduce)(_add_in_result_dtype(jax_funcify.dispatch(CAReduce)))
    for op_class in (Subtensor, AdvancedSubtensor, IncSubtensor, AdvancedIncSubtensor):
        jax_funcify.register(op_class)(_allow_traced_bounds(jax_funcify.dispatch(op_class)))
    vector_inc_subtensor = getattr(subtensor, "AdvancedIncSubtensor1", AdvancedIncSubtensor)  # gone in newer versions
    jax_funcify.register(vector_inc_subtensor)(_pass_values_as_arrays(jax_funcify.dispatch(vector_inc_subtensor)))
    for op_class, make_numpy_function in (
        # Elemwise requests its scalar Op's lowering with its own node.
        (ScalarOp, lambda op, node: to_python_function(op) if node.op is op else None),
        (Elemwise, _make_numpy_elemwise),
        (CAReduce, _make_numpy_reduction),
        (MakeVector, lambda op, node: lambda *x: np.array(x, op.dtype)),
        (ScalarFromTensor, lambda op, node: lambda x: x),
        (TensorFromScalar, lambda op, node: lambda x: x),
        (DimShuffle, lambda op, node: lambda x: np.reshape(x, (-1,) if node.outputs[0].type.ndim else ())),
        (Subtensor, lambda op, node: lambda *x: np.asarray(x[0])[split_indexing(op, x)[1]]),
        (IncSubtensor, _make_numpy_update),
        (Join, _make_numpy_join),
    ):
        # Subclasses may have lowerings of their own.
        for op in [registered for registered in jax_funcify.registry if issubclass(registered, op_class)]:
            jax_funcify.register(op)(_prefer_numpy(jax_funcify.dispatch(op), make_numpy_function))
    for graph_class in [c for c in jax_funcify.registry if c is not object and issubclass(FunctionGraph, c)]:
        jax_funcify.register(graph_class)(lower_graph)
    jax_funcify.register(Scan)(_expand_sequences(_keep_numbers_in_loop(jax_funcify.dispatch(Scan))))
    for op_class in (Alloc, AllocEmpty, Bartlett, Eye, Repeat, Scan):
        jax_funcify.register(op_class)(_require_known_shape(jax_funcify.dispatch(op_class)))
    for op_class in (Nonzero, Unique):
        jax_funcify.register(op_class)(_refuse_unknown_shape)
    jax_funcify.register(CheckAndRaise)(_check_known_conditions(jax_funcify.dispatch(CheckAndRaise)))
    jax_funcify.register(IfElse)(_keep_common_lengths(jax_funcify.dispatch(IfElse)))
    jax_funcify.register(Reshape)(_lower_reshape)
    jax_funcify.register(ARange)(_lower_arange)
    jax_funcify.register(Split)(_lower_split)
    jax_funcify.register(FixedLengthSubtensor)(_lower_fixed_length)
    for op in [registered for registered in jax_funcify.registry if issubclass(registered, RandomVariable)]:
        jax_funcify.register(op)(_allow_computed_size(jax_funcify.dispatch(op)))


def _refuse_op(op: object, **kwargs: Any) -> NoReturn:
    """Raise NotImplementedError for an Op that has no lowering."""
    raise NotImplementedError(f"JAX mode can't compute {op}: use another mode for this function, such as mode='NUMBA'")


def _refuse_missing_function(lowering: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the lowering of scalar Ops: raise NotImplementedError if JAX lacks the SciPy function of the Op's name."""

    def funcify(op: ScalarOp, **kwargs: Any) -> ArrayFunction:
        try:
            function: ArrayFunction = lowering(op, **kwargs)
        except AttributeError:
            _refuse_op(op)
        return function

    return funcify


def _compute_in_graph_dtype(lowering: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a lowering: convert the operands to the dtype in which PyTensor computes, if it is a float or complex dtype.

    This is the result's dtype, or for a comparison the operands' common one.  JAX would compute float64 results in
    float32 if all operands are integers of up to 32 bits, or if they are float32s and integers.
    """
    import jax
    import jax.numpy as jnp

    def funcify(op: Op, node: Node = None, **kwargs: Any) -> ArrayFunction:
        default: ArrayFunction = lowering(op, node=node, **kwargs)
        scalar_op = getattr(op, "scalar_op", None)
        if node is None or isinstance(scalar_op, Composite):
            return default
        # The other inputs are a condition, an order, or the axis of `Join`, which in newer PyTensor is an attribute.
        is_first_other = isinstance(scalar_op, Switch | PolyGamma) or (isinstance(op, Join) and not hasattr(op, "axis"))
        start = int(is_first_other)
        dtypes = {v.type.dtype for v in node.inputs[start:]}
        dtype = node.outputs[0].type.dtype
        if dtype == "bool" and dtypes:
            dtype = upcast(*dtypes)
        if np.dtype(dtype).kind not in "fc" or dtypes <= {dtype} or not all(np.can_cast(d, dtype) for d in dtypes):
            return default
        jax_dtype = jax.dtypes.canonicalize_dtype(dtype)
        return lambda *inputs: default(*inputs[:start], *(jnp.asarray(x, jax_dtype) for x in inputs[start:]))

    return funcify


def _add_in_result_dtype(lowering: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a reduction's lowering, which converts the result: convert the elements if their dtype is narrower."""
    import jax
    import jax.numpy as jnp

    def funcify(op: Op, node: Node = None, **kwargs: Any) -> ArrayFunction:
        default: ArrayFunction = lowering(op, node=node, **kwargs)
        if node is None:
            return default
        dtype, result_dtype = (np.dtype(v.type.dtype) for v in (*node.inputs, *node.outputs))
        if result_dtype.kind not in "fc" or dtype == result_dtype or not np.can_cast(dtype, result_dtype):
            return default
        return lambda x: default(jnp.asarray(x, jax.dtypes.canonicalize_dtype(result_dtype)))

    return funcify


def _lower_prod_without_zeros(op: ProdWithoutZeros, **kwargs: Any) -> ArrayFunction:
    """Lower the product of the elements that are not zero, which gradients of products contain."""
    import jax.numpy as jnp

    return lambda x: jnp.prod(jnp.where(x == 0, jnp.ones((), x.dtype), x), axis=op.axis, dtype=op.acc_dtype)


def _prefer_numpy(
    lowering: Callable[..., Any], make_numpy_function: Callable[[Any, Any], ArrayFunction | None]
) -> Callable[..., Any]:
    """Wrap a lowering: compute with NumPy if all inputs are known and the outputs may be shapes."""

    def funcify(op: Op, node: Node = None, **kwargs: Any) -> ArrayFunction:
        default = lowering(op, node=node, **kwargs)
        if node is None or not _may_be_shapes(node.outputs):
            return default
        compute = make_numpy_function(op, node)
        if compute is None:
            return default

        def run(*inputs: Any) -> Any:
            if not all(map(_is_known, inputs)):
                return default(*inputs)
            computed = compute(*map(to_number_or_array, inputs))
            if len(node.outputs) == 1:
                return _to_result(computed, node.outputs[0])
            return tuple(_to_result(*pair) for pair in zip(computed, node.outputs, strict=True))

        return run

    return funcify


def _may_be_shapes(variables: Sequence[Variable]) -> bool:
    """Whether all variables are scalars or vectors, and some of them integers."""
    dtypes = [getattr(v.type, "dtype", "") for v in variables]
    are_small = all(getattr(v.type, "ndim", 0) <= 1 for v in variables)
    return are_small and any(dtype == "bool" or "int" in dtype for dtype in dtypes)


def _is_known(value: object) -> bool:
    """Whether a value consists of few integers, none of them traced."""
    import jax

    if isinstance(value, tuple | list):
        return all(map(_is_known, value))
    if isinstance(value, jax.core.Tracer):
        return False
    if isinstance(value, bool | int | np.integer | np.bool_):
        return True
    return isinstance(value, np.ndarray | jax.Array) and value.dtype.kind in "biu" and value.size <= _MAX_SHAPE_SIZE


def _to_result(value: object, variable: Variable) -> Any:
    """Convert a NumPy result to the variable's dtype, and an integer scalar to a Python number."""
    array = np.asarray(value, variable.type.dtype)
    # A Python float would be cast to the dtype of the arrays that it is combined with.
    return array if array.dtype.kind == "f" else to_number_or_array(array)


# -- NumPy functions that compute Ops on integers ----------------------------------------------------------------------


def _make_numpy_elemwise(op: Op, node: Node) -> ArrayFunction:
    if not any(v.type.ndim for v in node.inputs):
        # A fused expression of lengths may have more operands than a NumPy ufunc accepts.
        return to_python_function(op.scalar_op)
    return np.vectorize(to_python_function(op.scalar_op), otypes=[v.type.dtype for v in node.outputs])


def _make_numpy_reduction(op: Op, node: Node) -> ArrayFunction | None:
    functions: dict[type, ArrayFunction] = {
        Add: np.sum,
        Mul: np.prod,
        ScalarMaximum: np.max,
        ScalarMinimum: np.min,
        AND: np.all,
        OR: np.any,
    }
    return functions.get(type(op.scalar_op))


def _make_numpy_update(op: Op, node: Node) -> ArrayFunction:
    def update(*inputs: Any) -> Any:
        (x, y), indices = split_indexing(op, inputs)
        result = np.array(x)
        result[indices] = y if op.set_instead_of_inc else result[indices] + y
        return result

    return update


def _make_numpy_join(op: Op, node: Node) -> ArrayFunction:
    # The first input is the axis; in newer PyTensor it is an attribute.  A shape has only one.
    first = 0 if hasattr(op, "axis") else 1
    return lambda *x: np.concatenate([np.atleast_1d(part) for part in x[first:]])


# -- Ops whose inputs determine shapes ---------------------------------------------------------------------------------


def _require_known_shape(lowering: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a lowering: require that the inputs that determine shapes are known, and pass them as numbers."""

    def funcify(op: Op, node: Node = None, **kwargs: Any) -> ArrayFunction:
        compute: ArrayFunction = lowering(op, node=node, **kwargs)
        shape_positions = [i for i, variable in enumerate(node.inputs) if variable in select_shape_inputs(node)]

        def run(*inputs: Any) -> Any:
            for i in shape_positions:
                _require_known(inputs[i], node.inputs[i])
            values = [to_number_or_array(value) if i in shape_positions else value for i, value in enumerate(inputs)]
            return compute(*values)

        return run

    return funcify


def _refuse_unknown_shape(op: Op, node: Node = None, **kwargs: Any) -> NoReturn:
    """Raise NotImplementedError for an Op whose output's shape depends on the values of an array."""
    raise _make_shape_error(node.outputs[0])


def _check_known_conditions(lowering: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap CheckAndRaise's lowering, which checks nothing: raise if a condition is known to be false."""

    def funcify(op: CheckAndRaise, node: Node = None, **kwargs: Any) -> ArrayFunction:
        default = lowering(op, node=node, **kwargs)

        def run(value: Any, *conditions: Any) -> Any:
            if not all(np.all(condition) for condition in conditions if _is_known(condition)):
                raise op.exc_type(op.msg)
            return default(value, *conditions)

        return run

    return funcify


def _keep_common_lengths(lowering: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap IfElse's lowering: return a known length or shape as it is if both branches have the same one."""

    def funcify(op: Op, node: Node = None, **kwargs: Any) -> ArrayFunction:
        default = lowering(op, node=node, **kwargs)

        def run(condition: Any, *branches: Any) -> Any:
            pairs = list(zip(branches[: op.n_outs], branches[op.n_outs :], strict=True))
            are_common = [_is_known(pair) and np.array_equal(*pair) for pair in pairs]
            if not any(are_common):
                return default(condition, *branches)
            if op.n_outs == 1:
                return pairs[0][0]
            results = default(condition, *branches)
            return [pair[0] if same else result for pair, same, result in zip(pairs, are_common, results, strict=True)]

        return run

    return funcify


def _lower_reshape(op: Op, node: Node = None, **kwargs: Any) -> ArrayFunction:
    """Lower Reshape to any shape that is known during tracing."""
    import jax.numpy as jnp

    def reshape(x: Array, shape: Any) -> Array:
        _require_known(shape, node.inputs[1])
        return jnp.reshape(x, tuple(int(n) for n in np.ravel(shape)))

    return reshape


def _lower_arange(op: Op, node: Node = None, **kwargs: Any) -> ArrayFunction:
    """Lower ARange to any length that is known during tracing."""
    import jax.numpy as jnp

    def arange(*limits: Any) -> Array:
        _require_known([x for x in limits if not isinstance(x, float | np.floating)], node.outputs[0])
        start, stop, step = map(to_number_or_array, limits)
        return jnp.arange(start, stop, step, dtype=op.dtype)

    return arange


def _lower_split(op: Op, node: Node = None, **kwargs: Any) -> ArrayFunction:
    """Lower Split to chunks of any lengths that are known during tracing."""
    import jax.numpy as jnp

    def split(x: Array, *arguments: Any) -> Any:
        # The axis is an input, or in newer PyTensor an attribute.
        axis, lengths = arguments if len(arguments) == 2 else (op.axis, *arguments)
        _require_known((axis, lengths), node.inputs[-1])
        lengths = np.ravel(lengths)
        if len(lengths) != op.len_splits or min(lengths) < 0 or sum(lengths) != x.shape[int(axis)]:
            raise ValueError(
                f"split: expected {op.len_splits} lengths of 0 or more whose sum is {x.shape[int(axis)]}, "
                f"got {lengths.tolist()}"
            )
        chunks = jnp.split(x, np.cumsum(lengths)[:-1].tolist(), axis=int(axis))
        return chunks if len(chunks) > 1 else chunks[0]

    return split


def _allow_computed_size(lowering: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a RandomVariable's lowering: allow any size that is known during tracing."""

    def funcify(op: Op, node: Node = None, **kwargs: Any) -> ArrayFunction:
        rng, size, *parameters = node.inputs
        # PyTensor's lowering rejects some sizes because of their Op, so it gets a size without an owner.
        new_size = size if isinstance(size, Constant) else size.type()
        new_node = Apply(op, [rng, new_size, *parameters], [output.type() for output in node.outputs])
        draw = lowering(op, node=new_node, **kwargs)

        def run(rng: Any, size: Any, *parameters: Any) -> Any:
            if size is not None and not isinstance(size_variable := node.inputs[1], Constant):
                _require_known(size, size_variable)
                size = tuple(int(n) for n in np.ravel(size))
            return draw(rng, size, *parameters)

        return run

    return funcify


def _require_known(value: object, variable: Variable) -> None:
    """Raise NotImplementedError if a value that determines a shape is traced."""
    if not _is_known(value):
        raise _make_shape_error(variable)


def _make_shape_error(variable: Variable) -> NotImplementedError:
    """Return the error for a shape, or an array of a shape, that is not known when XLA compiles."""
    return NotImplementedError(
        "XLA compiles for fixed shapes, but this shape depends on the values of arrays: "
        f"{debugprint(variable, file='str', depth=4).strip()}\n{LENGTH_HINT}"
    )


# -- slices --------------------------------------------------------------------------------------------------------


def _allow_traced_bounds(lowering: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an indexing lowering: allow slices with traced bounds whose difference is constant."""
    import jax.numpy as jnp

    def funcify(op: Op, node: Node = None, **kwargs: Any) -> ArrayFunction:
        default = lowering(op, node=node, **kwargs)
        if node is None:
            return default
        variables, polynomials = split_indexing(op, node.inputs)[1], dict(_sequence_polynomials)

        def run(*inputs: Any) -> Any:
            operands, indices = split_indexing(op, inputs)
            traced_positions = [
                i
                for i, (index, variable) in enumerate(zip(indices, variables, strict=True))
                if isinstance(index, slice) and isinstance(variable, slice) and not _has_known_bounds(index)
            ]
            if not traced_positions:
                # Lengths are NumPy arrays, which have no updates in JAX's style.
                return default(jnp.asarray(inputs[0]), *inputs[1:]) if len(operands) == 2 else default(*inputs)
            lengths = [_require_constant_length(variables[i], polynomials) for i in traced_positions]
            return _index_with_lengths(op, operands, indices, traced_positions, lengths, is_exact=False)

        return run

    return funcify


def _pass_values_as_arrays(lowering: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a lowering that reads attributes of the values that it stores: constant values are numbers."""

    def funcify(op: Op, node: Node = None, **kwargs: Any) -> ArrayFunction:
        default, dtype = lowering(op, node=node, **kwargs), node.inputs[1].type.dtype

        def run(x: Array, values: Any, *indices: Any) -> Any:
            return default(x, values if hasattr(values, "ndim") else np.asarray(values, dtype), *indices)

        return run

    return funcify


def _lower_fixed_length(op: FixedLengthSubtensor, node: Node = None, **kwargs: Any) -> ArrayFunction:
    """Lower indexing by slices whose lengths are inputs."""
    n = len(op.positions)

    def run(*inputs: Any) -> Any:
        operands, indices = split_indexing(op.op, inputs[:-n])
        return _index_with_lengths(op.op, operands, indices, op.positions, inputs[-n:], is_exact=True)

    return run


def _index_with_lengths(
    op: Op, operands: Sequence[Any], indices: Sequence[Any], positions: Sequence[int], lengths: Any, is_exact: bool
) -> Array:
    """Index an array, or update it by index, with given lengths of the slices at ``positions``.

    The bounds of these slices may be traced.  The operands are the array, and for an update also the new values.
    A slice may have another length, for example where it extends beyond the end.  The shape of the result can't change,
    so unless ``is_exact`` the result is then filled with `_get_invalid_value`.
    """
    import jax.numpy as jnp

    slices = []
    for position, length in zip(positions, lengths, strict=True):
        before = indices[:position]
        # A boolean mask indexes one axis for each of its own.
        axis = sum(np.ndim(i) if str(getattr(i, "dtype", "")) == "bool" else 1 for i in before)
        slices.append((axis, indices[position], int(length)))
    other_indices = tuple(slice(None) if i in positions else index for i, index in enumerate(indices))

    def index_slices(x: Array, slices: Sequence[Any]) -> Array:
        if not slices:
            if len(operands) == 1:
                return x[other_indices]
            selected = x.at[other_indices]
            return selected.set(operands[1]) if op.set_instead_of_inc else selected.add(operands[1])
        (axis, index, length), *others = slices
        element_positions, matches_length = _find_element_positions(index, x.shape[axis], length)
        chunk = _take_elements(x, element_positions, length, axis)
        result = index_slices(chunk, others)
        if len(operands) == 2:
            result = _put_elements(x, result, element_positions, axis)
        return result if is_exact else jnp.where(matches_length, result, _get_invalid_value(result.dtype))

    return index_slices(jnp.asarray(operands[0]), slices)


def _find_element_positions(index: slice, axis_length: int, length: int) -> tuple[Array, Array]:
    """Return the positions of a slice's elements, and whether there are ``length`` of them.

    If the step is 1, the first position stands for all.
    """
    import jax.numpy as jnp

    step = 1 if index.step is None else index.step
    last = jnp.where(step > 0, axis_length, axis_length - 1)
    lowest = jnp.where(step > 0, 0, -1)

    def clip_bound(value: Any) -> Array:
        return jnp.clip(jnp.where(value < 0, value + axis_length, value), lowest, last)

    # Bounds may be unsigned, or have few bits.
    start = (
        jnp.where(step > 0, 0, axis_length - 1) if index.start is None else clip_bound(jnp.asarray(index.start, int))
    )
    stop = jnp.where(step > 0, axis_length, -1) if index.stop is None else clip_bound(jnp.asarray(index.stop, int))
    matches_length = jnp.maximum(-((start - stop) // step), 0) == length
    return (start if _is_known(step) and int(step) == 1 else start + step * jnp.arange(length)), matches_length


def _take_elements(x: Array, element_positions: Any, length: int, axis: int) -> Array:
    import jax.numpy as jnp
    from jax import lax

    if np.ndim(element_positions):
        return jnp.take(x, element_positions, axis=axis, mode="clip")
    return lax.dynamic_slice_in_dim(x, element_positions, length, axis)


def _put_elements(x: Array, chunk: Any, element_positions: Any, axis: int) -> Array:
    from jax import lax

    if np.ndim(element_positions):
        return x.at[(slice(None),) * axis + (element_positions,)].set(chunk)
    return lax.dynamic_update_slice_in_dim(x, chunk, element_positions, axis)


def _get_invalid_value(dtype: Any) -> Any:
    """Return the value of invalid elements: NaN, the least integer, or False."""
    kind = np.dtype(dtype).kind
    return np.nan if kind in "fcV" else False if kind == "b" else np.iinfo(dtype).min


def _has_known_bounds(index: slice) -> bool:
    return all(bound is None or _is_known(bound) for bound in (index.start, index.stop, index.step))


def _require_constant_length(index: slice, polynomials: Mapping[Any, Polynomial]) -> int:
    """Return the constant length of a slice of variables.  Raise NotImplementedError if it is not constant."""
    length = find_constant_extent(index, polynomials)
    if length is not None:
        return length
    bounds = {"start": index.start, "stop": index.stop, "step": index.step}
    described_bounds = [
        f"{k}: {debugprint(v, file='str', depth=4).strip()}" for k, v in bounds.items() if v is not None
    ]
    raise NotImplementedError(
        "XLA compiles for fixed shapes, but the length of a slice depends on the values of arrays.\n"
        + "\n".join([*described_bounds, LENGTH_HINT])
    )


#: Polynomials of the elements of integer sequences, for the loops that are being lowered.
_sequence_polynomials: dict[Any, Polynomial] = {}


def _expand_sequences(lowering: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Scan's lowering: express elements of integer sequences by variables outside the loop.

    PyTensor computes bounds of slices outside the loop, and passes them to it as sequences.
    """

    def funcify(op: Op, node: Node = None, **kwargs: Any) -> ArrayFunction:
        outer_sequences, inner_sequences = op.outer_seqs(node.inputs), op.inner_seqs(op.fgraph.inputs)
        outer_polynomials = dict(_sequence_polynomials)
        _sequence_polynomials.update(
            (inner, to_polynomial(outer, outer_polynomials))
            for outer, inner in zip(outer_sequences, inner_sequences, strict=True)
            if "int" in getattr(outer.type, "dtype", "")
        )
        try:
            compute: ArrayFunction = lowering(op, node=node, **kwargs)
        finally:
            _sequence_polynomials.clear()
            _sequence_polynomials.update(outer_polynomials)
        return compute

    return funcify


def _keep_numbers_in_loop(lowering: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Scan's lowering: a length that a step takes from outside the loop remains a number within it.

    PyTensor's lowering carries such numbers from step to step, as traced values.  Values in the loop keep their dtypes.
    """

    def funcify(op: Op, node: Node = None, **kwargs: Any) -> ArrayFunction:
        known_inputs: dict[int, Any] = {}
        compute = lowering(op, node=node, **{**kwargs, "keeps_dtypes": True, "known_inputs": known_inputs})
        start = len(op.fgraph.inputs) - op.info.n_non_seqs

        def run(*inputs: Any) -> Any:
            for i, value in enumerate(op.outer_non_seqs(inputs), start):
                if np.ndim(value) == 0 and _is_known(value):
                    known_inputs[i] = value
            try:
                return compute(*inputs)
            finally:
                known_inputs.clear()

        return run

    return funcify
