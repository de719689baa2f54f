"""Lengths stay numbers when JAX traces a function.

`register_lowerings`
    Registers the lowerings with PyTensor.

`lengths` has the other half: lengths that depend on the values of a function's inputs.

XLA compiles for fixed shapes, so that while a function is traced each array's shape is a tuple of numbers.  PyTensor's
lowerings compute with them by JAX all the same, after which they are traced values, which neither a reshape nor a
slice takes; programs written for Theano reshape by what they compute from shapes all the time.  Here, Ops on integers
that are known as the function is traced are computed by NumPy then, and all others as before.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
from pytensor.graph.basic import Apply, Constant
from pytensor.printing import debugprint
from pytensor.scalar.basic import (
    AND,
    OR,
    Add,
    Cast,
    Composite,
    Identity,
    Mul,
    Neg,
    ScalarMaximum,
    ScalarMinimum,
    ScalarOp,
    Sub,
)
from pytensor.scan.op import Scan
from pytensor.tensor.basic import (
    Alloc,
    AllocEmpty,
    ARange,
    Eye,
    Join,
    MakeVector,
    ScalarFromTensor,
    Split,
    TensorFromScalar,
)
from pytensor.tensor.elemwise import CAReduce, DimShuffle, Elemwise
from pytensor.tensor.random.op import RandomVariable
from pytensor.tensor.shape import Reshape
from pytensor.tensor.subtensor import (
    AdvancedIncSubtensor,
    AdvancedSubtensor,
    IncSubtensor,
    Subtensor,
)

from synkhronos.lowering.lengths import SlicedSubtensor, decisive, indices_of, of_numbers

__all__ = ["constant_length", "register_lowerings"]

#: What has more elements is data and no shape.
_MOST = 64

#: What a program can do.
HINT = (
    "In JAX mode lengths may depend on shapes, and on inputs and shared variables that are single integers. Pass the "
    "length as such an input; take rows by x[start + arange(length)]; or use another mode for this function"
)

Compute = Callable[..., Any]


@cache
def register_lowerings() -> None:
    """Put a computation by NumPy in front of PyTensor's lowerings of some Ops; once."""
    from pytensor.link.jax.dispatch import jax_funcify

    for base in (Subtensor, AdvancedSubtensor, IncSubtensor, AdvancedIncSubtensor):
        jax_funcify.register(base)(_sliced(jax_funcify.dispatch(base)))
    for base, by_numpy in (
        (ScalarOp, _scalar),
        (Elemwise, _elemwise),
        (CAReduce, _reduce),
        (MakeVector, _make_vector),
        (ScalarFromTensor, _same),
        (TensorFromScalar, _same),
        (DimShuffle, _dimshuffle),
        (Subtensor, _subtensor),
        (Join, _join),
    ):
        # Subclasses may have lowerings of their own.
        for op in [known for known in jax_funcify.registry if issubclass(known, base)]:
            jax_funcify.register(op)(_in_front(jax_funcify.dispatch(op), by_numpy))
    jax_funcify.register(Scan)(_loop(jax_funcify.dispatch(Scan)))
    for base in (Alloc, AllocEmpty, Eye, Scan):
        jax_funcify.register(base)(_of_known(jax_funcify.dispatch(base)))
    jax_funcify.register(Reshape)(_reshape)
    jax_funcify.register(ARange)(_arange)
    jax_funcify.register(Split)(_split)
    jax_funcify.register(SlicedSubtensor)(_rows)
    for op in [known for known in jax_funcify.registry if issubclass(known, RandomVariable)]:
        jax_funcify.register(op)(_drawn(jax_funcify.dispatch(op)))


def _in_front(lowering: Callable[..., Any], by_numpy: Callable[[Any, Any], Compute | None]) -> Callable[..., Any]:
    """Return a lowering that computes by NumPy what is known, if the outputs are integers of a shape's size."""

    def funcify(op: Any, node: Any = None, **kwargs: Any) -> Compute:
        traced = lowering(op, node=node, **kwargs)
        if node is None or not _may_be_shapes(node.outputs):
            return traced
        compute = by_numpy(op, node)
        if compute is None:
            return traced

        def run(*inputs: Any) -> Any:
            if not all(map(_is_known, inputs)):
                return traced(*inputs)
            computed = compute(*map(_number, inputs))
            if len(node.outputs) == 1:
                return _result(computed, node.outputs[0])
            return tuple(_result(*pair) for pair in zip(computed, node.outputs, strict=True))

        return run

    return funcify


def _may_be_shapes(variables: Sequence[Any]) -> bool:
    """Whether there are integers among some variables, and nothing large."""
    dtypes = [getattr(v.type, "dtype", "") for v in variables]
    small = all(getattr(v.type, "ndim", 0) <= 1 for v in variables)
    return small and any(dtype == "bool" or "int" in dtype for dtype in dtypes)


def _is_known(value: Any) -> bool:
    """Whether a value is an integer, or a few, and not traced."""
    import jax

    if isinstance(value, tuple | list):
        return all(map(_is_known, value))
    if isinstance(value, jax.core.Tracer):
        return False
    if isinstance(value, bool | int | np.integer | np.bool_):
        return True
    return isinstance(value, np.ndarray | jax.Array) and value.dtype.kind in "biu" and value.size <= _MOST


def _result(value: Any, variable: Any) -> Any:
    array = np.asarray(value, variable.type.dtype)
    # A float of Python's would take on other arrays' dtype.
    return array if array.dtype.kind == "f" else _number(array)


def _number(value: Any) -> Any:
    array = np.asarray(value)
    return array if array.ndim else array.item()


# -- by NumPy ------------------------------------------------------------------------------------------------------


def _elemwise(op: Any, node: Any) -> Compute:
    if not any(v.type.ndim for v in node.inputs):
        # What a network's lengths are fused to may have more operands than a function of NumPy's can.
        return of_numbers(op.scalar_op)
    return np.vectorize(of_numbers(op.scalar_op), otypes=[v.type.dtype for v in node.outputs])


def _scalar(op: Any, node: Any) -> Compute | None:
    # Elemwise asks for its scalar Op's lowering with its own node.
    return of_numbers(op) if node.op is op else None


def _reduce(op: Any, node: Any) -> Compute | None:
    known: dict[type, Compute] = {
        Add: np.sum,
        Mul: np.prod,
        ScalarMaximum: np.max,
        ScalarMinimum: np.min,
        AND: np.all,
        OR: np.any,
    }
    return known.get(type(op.scalar_op))


def _make_vector(op: Any, node: Any) -> Compute:
    return lambda *x: np.array(x, op.dtype)


def _same(op: Any, node: Any) -> Compute:
    return lambda x: x


def _dimshuffle(op: Any, node: Any) -> Compute:
    return lambda x: np.reshape(x, (-1,) if node.outputs[0].type.ndim else ())


def _subtensor(op: Any, node: Any) -> Compute:
    return lambda x, *index: np.asarray(x)[tuple(indices_of(op, index))]


def _join(op: Any, node: Any) -> Compute:
    # In newer PyTensor the axis belongs to the Op; a shape has only one.
    first = 0 if hasattr(op, "axis") else 1
    return lambda *x: np.concatenate([np.atleast_1d(part) for part in x[first:]])


# -- what takes a shape --------------------------------------------------------------------------------------------


def _of_known(lowering: Callable[..., Any]) -> Callable[..., Any]:
    """Compute as before, if what decides the shape is known when the function is traced."""

    def funcify(op: Any, node: Any = None, **kwargs: Any) -> Compute:
        compute: Compute = lowering(op, node=node, **kwargs)
        deciding = [i for i, variable in enumerate(node.inputs) if variable in decisive(node)]

        def run(*inputs: Any) -> Any:
            for i in deciding:
                _require_known(inputs[i], node.inputs[i])
            return compute(*[_number(value) if i in deciding else value for i, value in enumerate(inputs)])

        return run

    return funcify


def _reshape(op: Any, node: Any = None, **kwargs: Any) -> Compute:
    """Reshape to any shape that is known when the function is traced."""
    import jax.numpy as jnp

    def reshape(x: Any, shape: Any) -> Any:
        _require_known(shape, node.inputs[1])
        return jnp.reshape(x, tuple(int(n) for n in np.ravel(shape)))

    return reshape


def _arange(op: Any, node: Any = None, **kwargs: Any) -> Compute:
    """Count to any length that is known when the function is traced."""
    import jax.numpy as jnp

    def arange(*limits: Any) -> Any:
        _require_known([x for x in limits if not isinstance(x, float | np.floating)], node.outputs[0])
        start, stop, step = map(_number, limits)
        return jnp.arange(start, stop, step, dtype=op.dtype)

    return arange


def _split(op: Any, node: Any = None, **kwargs: Any) -> Compute:
    """Cut into parts of any lengths that are known when the function is traced."""
    import jax.numpy as jnp

    def split(x: Any, *where: Any) -> Any:
        # In newer PyTensor the axis belongs to the Op.
        axis, lengths = where if len(where) == 2 else (op.axis, *where)
        _require_known((axis, lengths), node.inputs[-1])
        parts = jnp.split(x, np.cumsum(np.ravel(lengths))[:-1].tolist(), axis=int(axis))
        return parts if len(parts) > 1 else parts[0]

    return split


def _drawn(lowering: Callable[..., Any]) -> Callable[..., Any]:
    """Draw an array of any shape that is known when the function is traced."""

    def funcify(op: Any, node: Any = None, **kwargs: Any) -> Compute:
        rng, size, *parameters = node.inputs
        # PyTensor refuses sizes by what has computed them.
        free = size if isinstance(size, Constant) else size.type()
        draw = lowering(op, node=Apply(op, [rng, free, *parameters], [o.type() for o in node.outputs]), **kwargs)

        def run(rng: Any, size: Any, *parameters: Any) -> Any:
            if size is not None and not isinstance(size_variable := node.inputs[1], Constant):
                _require_known(size, size_variable)
                size = tuple(int(n) for n in np.ravel(size))
            return draw(rng, size, *parameters)

        return run

    return funcify


def _require_known(value: Any, variable: Any) -> None:
    if not _is_known(value):
        raise NotImplementedError(
            "XLA compiles for fixed shapes, and this one depends on what arrays hold: "
            f"{debugprint(variable, file='str', depth=4).strip()}\n{HINT}"
        )


# -- slices --------------------------------------------------------------------------------------------------------


def _sliced(lowering: Callable[..., Any]) -> Callable[..., Any]:
    """Index by slices with bounds that are traced, if their difference is constant."""

    def funcify(op: Any, node: Any = None, **kwargs: Any) -> Compute:
        plain = lowering(op, node=node, **kwargs)
        if node is None:
            return plain
        n_before = 2 if isinstance(op, IncSubtensor | AdvancedIncSubtensor) else 1
        variables, known = indices_of(op, node.inputs[n_before:]), dict(_sequences)

        def run(*inputs: Any) -> Any:
            indices = indices_of(op, inputs[n_before:])
            traced = [
                i
                for i, (index, variable) in enumerate(zip(indices, variables, strict=True))
                if isinstance(index, slice) and isinstance(variable, slice) and not _is_fixed(index)
            ]
            if not traced:
                return plain(*inputs)
            lengths = [_length(variables[i], known) for i in traced]
            return _at(op, inputs[:n_before], indices, traced, lengths, in_bounds=False)

        return run

    return funcify


def _rows(op: SlicedSubtensor, node: Any = None, **kwargs: Any) -> Compute:
    """Index by slices whose lengths are given."""
    n_before = 2 if isinstance(op.op, IncSubtensor | AdvancedIncSubtensor) else 1
    n = len(op.positions)

    def run(*inputs: Any) -> Any:
        indices = indices_of(op.op, inputs[n_before:-n])
        return _at(op.op, inputs[:n_before], indices, op.positions, inputs[-n:], in_bounds=True)

    return run


def _at(
    op: Any, operands: Sequence[Any], indices: Sequence[Any], positions: Sequence[int], lengths: Any, in_bounds: bool
) -> Any:
    """Index, or update by index, with the lengths of some slices given.

    ``in_bounds`` says that these lengths are what NumPy would come to.  If they may not be, and are not, the result is
    not a number: an array of another shape can't be.
    """
    import jax.numpy as jnp

    cuts = []
    for position, length in zip(positions, lengths, strict=True):
        before = indices[:position]
        # A mask takes as many axes as it has.
        axis = sum(np.ndim(i) if str(getattr(i, "dtype", "")) == "bool" else 1 for i in before)
        cuts.append((axis, indices[position], int(length)))
    rest = tuple(slice(None) if i in positions else index for i, index in enumerate(indices))

    def at(x: Any, cuts: Sequence[Any]) -> Any:
        if not cuts:
            if len(operands) == 1:
                return x[rest]
            return x.at[rest].set(operands[1]) if op.set_instead_of_inc else x.at[rest].add(operands[1])
        (axis, index, length), *others = cuts
        places, is_right = _places(index, x.shape[axis], length)
        part = _take(x, places, length, axis)
        result = at(part, others)
        if len(operands) == 2:
            result = _put(x, result, places, length, axis)
        return result if in_bounds else jnp.where(is_right, result, _nothing(result.dtype))

    return at(jnp.asarray(operands[0]), cuts)


def _places(index: slice, of: int, length: int) -> tuple[Any, Any]:
    """Return where the elements of a slice are, and whether NumPy would come to the same length.

    They are where the first is if the step is one, else where each is.
    """
    import jax.numpy as jnp

    step = 1 if index.step is None else index.step
    last = jnp.where(step > 0, of, of - 1)
    lowest = jnp.where(step > 0, 0, -1)

    def bound(value: Any) -> Any:
        return jnp.clip(jnp.where(value < 0, value + of, value), lowest, last)

    # Bounds may be unsigned, or of few bits.
    start = jnp.where(step > 0, 0, of - 1) if index.start is None else bound(jnp.asarray(index.start, int))
    stop = jnp.where(step > 0, of, -1) if index.stop is None else bound(jnp.asarray(index.stop, int))
    is_right = jnp.maximum(-((start - stop) // step), 0) == length
    return (start if _is_one(step) else start + step * jnp.arange(length)), is_right


def _is_one(step: Any) -> bool:
    return _is_known(step) and int(step) == 1


def _take(x: Any, places: Any, length: int, axis: int) -> Any:
    import jax.numpy as jnp
    from jax import lax

    if np.ndim(places):
        return jnp.take(x, places, axis=axis, mode="clip")
    return lax.dynamic_slice_in_dim(x, places, length, axis)


def _put(x: Any, part: Any, places: Any, length: int, axis: int) -> Any:
    from jax import lax

    if np.ndim(places):
        return x.at[(slice(None),) * axis + (places,)].set(part)
    return lax.dynamic_update_slice_in_dim(x, part, places, axis)


def _nothing(dtype: Any) -> Any:
    """Return what says that there is no number: NaN, or the least integer."""
    kind = np.dtype(dtype).kind
    return np.nan if kind in "fcV" else False if kind == "b" else np.iinfo(dtype).min


def _is_fixed(index: slice) -> bool:
    return all(bound is None or _is_known(bound) for bound in (index.start, index.stop, index.step))


#: Coefficients of products of atoms: of what an expression is not made of by sums and products.
Polynomial = Counter[tuple[Any, ...]]


def constant_length(index: slice, known: dict[Any, Polynomial]) -> int | None:
    """Return the length of a slice, where stop minus start is constant; None where it is not.

    ``known`` are the polynomials of some variables.
    """
    step = index.step
    if index.start is not None and index.stop is not None and (step is None or _polynomial(step, known) == {(): 1}):
        difference = _polynomial(index.stop, known)
        difference.subtract(_polynomial(index.start, known))
        if not any(count for atoms, count in difference.items() if atoms):
            return max(difference[()], 0)
    return None


def _length(index: slice, known: dict[Any, Polynomial]) -> int:
    """Return the constant length of a slice; raise NotImplementedError where it is not constant."""
    length = constant_length(index, known)
    if length is not None:
        return length
    bounds = {"start": index.start, "stop": index.stop, "step": index.step}
    shown = [f"{k}: {debugprint(v, file='str', depth=4).strip()}" for k, v in bounds.items() if v is not None]
    raise NotImplementedError(
        "XLA compiles for fixed shapes, and the length of a slice depends on what arrays hold.\n"
        + "\n".join([*shown, HINT])
    )


def _polynomial(variable: Any, known: dict[Any, Polynomial]) -> Polynomial:
    """Return an integer expression as a polynomial; of an array, as one that holds for each element."""
    if variable in known:
        return Counter(known[variable])
    if isinstance(variable, Constant):
        data = np.asarray(variable.data, np.int64)
        first = int(data.flat[0]) if data.size else 0
        rest = data - first
        return Counter({(): first, (("constant", rest.shape, rest.tobytes()),): 1} if rest.any() else {(): first})
    node = variable.owner
    op = getattr(node, "op", None)
    op = getattr(op, "scalar_op", op)
    if isinstance(op, Add | Sub | Mul | Neg | Identity | TensorFromScalar | ScalarFromTensor | DimShuffle) or (
        isinstance(op, Cast) and all("int" in v.type.dtype for v in node.inputs)
    ):
        return _combined(op, [_polynomial(source, known) for source in node.inputs])
    if isinstance(op, Composite):
        terms = [_polynomial(source, known) for source in node.inputs]
        inside = dict(zip(op.fgraph.inputs, terms, strict=True))
        return _polynomial(op.fgraph.outputs[node.outputs.index(variable)], inside)
    if isinstance(op, Subtensor):
        # Elements of a sum are sums of elements.
        where = str(op.idx_list), *(int(v.data) if isinstance(v, Constant) else v for v in node.inputs[1:])
        whole = _polynomial(node.inputs[0], known)
        return Counter({tuple((where, atom) for atom in atoms): n for atoms, n in whole.items()})
    return Counter({(variable,): 1})


def _combined(op: Any, terms: list[Polynomial]) -> Polynomial:
    result = Counter(terms[0])
    for term in terms[1:]:
        if isinstance(op, Mul):
            product: Polynomial = Counter()
            for (a, m), (b, n) in itertools.product(result.items(), term.items()):
                product[tuple(sorted(a + b, key=hash))] += m * n
            result = product
        elif isinstance(op, Sub):
            result.subtract(term)
        else:
            result.update(term)
    return Counter({atoms: -n for atoms, n in result.items()}) if isinstance(op, Neg) else result


#: In the steps of the loops that are being lowered: the polynomials of what runs over sequences.
_sequences: dict[Any, Polynomial] = {}


def _loop(lowering: Callable[..., Any]) -> Callable[..., Any]:
    """Lower a loop, in whose steps bounds of slices are known as what they are outside: PyTensor takes them there."""

    def funcify(op: Any, node: Any = None, **kwargs: Any) -> Compute:
        outside, inside = op.outer_seqs(node.inputs), op.inner_seqs(op.fgraph.inputs)
        before = dict(_sequences)
        _sequences.update(
            (inner, _polynomial(outer, before))
            for outer, inner in zip(outside, inside, strict=True)
            if "int" in getattr(outer.type, "dtype", "")
        )
        try:
            compute: Compute = lowering(op, node=node, **kwargs)
        finally:
            _sequences.clear()
            _sequences.update(before)
        return compute

    return funcify
