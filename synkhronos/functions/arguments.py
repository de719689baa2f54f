"""Checks of the arguments of `synkhronos.function`, and the `Computation` built from them."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from synkhronos.checks import check_distinct, check_name, describe
from synkhronos.devices import Device
from synkhronos.devices.reduce_op import REDUCE_OPS, list_ops
from synkhronos.functions.computation import Computation
from synkhronos.graph_libraries import GraphLibrary, get_library, is_variable, list_loaded_libraries
from synkhronos.graph_libraries.library import InputSpec
from synkhronos.variable_types import Mode, Variable

#: Keyword arguments of a call that are not inputs.
CALL_OPTIONS = ("batch", "batch_s", "num_slices", "output_subset")
_name_numbers = itertools.count()


def build_computation(
    inputs: object,
    outputs: object,
    bcast_inputs: object,
    updates: object,
    givens: object,
    sliceable_shareds: object,
    kwargs: dict[str, Any],
    device: Device,
) -> Computation:
    """Return the computation of a function, from the arguments of `synkhronos.function`.

    The ranks' device determines the default mode.
    """
    scattered, broadcast = _as_list(inputs, "inputs"), _as_list(bcast_inputs, "bcast_inputs")
    raw_outputs, raw_ops = _split_outputs_from_ops(outputs)
    updates_forms = (
        "a dict, or a list of (shared, expression[, op])",
        "(shared, expression) or (shared, expression, op)",
    )
    raw_updates = [(*update, "avg")[:3] for update in _as_tuples(updates, "updates", (2, 3), *updates_forms)]
    raw_givens = _as_tuples(givens, "givens", (2,), "a dict, or a list of pairs", "pairs of variables")
    sliceable = _as_list(sliceable_shareds, "sliceable_shareds")
    library = _find_library(
        inputs=scattered,
        bcast_inputs=broadcast,
        outputs=raw_outputs,
        updates=[shared for shared, _, _ in raw_updates],
        givens=[key for key, _ in raw_givens],
        sliceable_shareds=sliceable,
    )
    specs = _parse_inputs(library, scattered, broadcast, kwargs.get("allow_input_downcast"))
    ops = [
        _parse_output_op(library, output, op, i)
        for i, (output, op) in enumerate(zip(raw_outputs, raw_ops, strict=True))
    ]
    pairs, update_ops = _parse_updates(library, raw_updates)
    substitutions = [
        (key, value if library.is_variable(value) else _convert_replacement(library, key, value, "givens"))
        for key, value in raw_givens
    ]
    _check_free_variables(library, specs, raw_outputs, pairs, substitutions)
    _check_sliceable(library, sliceable)
    _check_kwargs(library, kwargs)
    # The mode is resolved in the master, since the workers' configuration may differ.
    kwargs = {**kwargs, "mode": _resolve_mode(library, kwargs.get("mode"), device)}
    name = kwargs.get("name")
    check_name(name)
    return Computation(
        inputs=specs,
        n_scattered=len(scattered),
        outputs=raw_outputs,
        output_ops=ops,
        given_output_ops=raw_ops,
        updates=pairs,
        update_ops=update_ops,
        given_update_ops=[op for _, _, op in raw_updates],
        givens=substitutions,
        sliceable_shareds=sliceable,
        library_kwargs=kwargs,
        name=name or f"synk_function_{next(_name_numbers)}",
        library=library,
    )


def _parse_inputs(
    library: GraphLibrary, scattered: list[Any], broadcast: list[Any], allow_downcast: bool | None
) -> list[InputSpec]:
    """Return the specifications of the scattered inputs, then those of the broadcast inputs."""
    specs = [_parse_input(library, value, "inputs", allow_downcast) for value in scattered]
    specs += [_parse_input(library, value, "bcast_inputs", allow_downcast) for value in broadcast]
    for spec in specs[: len(scattered)]:
        if spec.variable.type.ndim == 0:
            raise ValueError(f"inputs: {describe(spec.variable)} has no rows to scatter; put it into bcast_inputs")
        if library.get_static_shape(spec.variable)[0] is not None:
            raise ValueError(
                f"inputs: axis 0 of {describe(spec.variable)} has a fixed length and can't be scattered; "
                "put it into bcast_inputs"
            )
    seen: set[int] = set()
    for spec in specs:
        if id(spec.variable) in seen:
            raise ValueError(f"inputs: {describe(spec.variable)} is given twice")
        seen.add(id(spec.variable))
        if spec.default_tuple and spec.name in CALL_OPTIONS:  # a call by this name would use the default
            raise ValueError(f"inputs: {spec.name!r} has a default, and the name of an option of calls; rename it")
    return specs


def _parse_updates(
    library: GraphLibrary, updates: list[tuple[Any, Any, Any]]
) -> tuple[list[tuple[Any, Any]], list[str | None]]:
    """Return pairs of shared variable and new value, and the op by which each new value is accumulated over slices."""
    pairs, ops = [], []
    for shared, expression, op in updates:
        if not library.is_shared(shared):
            raise TypeError(f"updates: expected a shared variable to update, got {shared!r}")
        pairs.append((shared, _convert_replacement(library, shared, expression, "updates")))
        ops.append(parse_op(op, f"updates: the op of {describe(shared)}"))
    check_distinct([shared for shared, _ in pairs], "updates")
    return pairs, ops


def _check_sliceable(library: GraphLibrary, sliceable: list[Any]) -> None:
    """Raise TypeError or ValueError for a variable that ``sliceable_shareds`` may not contain."""
    for shared in sliceable:
        if not library.is_shared(shared):
            raise TypeError(f"sliceable_shareds: expected shared variables, got {shared!r}")
        if not library.is_array(shared) or shared.type.ndim == 0 or library.get_static_shape(shared)[0] is not None:
            raise ValueError(f"sliceable_shareds: {describe(shared)} has no rows to divide")
    check_distinct(sliceable, "sliceable_shareds")


def _as_list(values: object, name: str) -> list[Any]:
    if values is None:
        return []
    if not isinstance(values, list | tuple):
        raise TypeError(f"{name}: expected a list or tuple of variables, got {values!r}")
    return list(values)


def _as_tuples(values: object, name: str, lengths: tuple[int, ...], expected: str, expected_item: str) -> list[Any]:
    """Return a dict, or a list of tuples of some lengths, as a list of tuples."""
    if values is None:
        return []
    items = values
    if isinstance(values, Mapping):
        has_ops = 3 in lengths
        items = [(key, *new) if has_ops and isinstance(new, tuple) else (key, new) for key, new in values.items()]
    if isinstance(items, str) or not isinstance(items, Iterable) or is_variable(items):
        raise TypeError(f"{name}: expected {expected}, got {values!r}")
    tuples = []
    for item in items:
        if not isinstance(item, list | tuple) or len(item) not in lengths:
            raise TypeError(f"{name}: expected {expected_item}, got {item!r}")
        tuples.append(tuple(item))
    return tuples


def _split_outputs_from_ops(outputs: Any) -> tuple[list[Any], list[Any]]:
    """Return the output variables and their ops."""
    if outputs is None:
        return [], []
    if isinstance(outputs, Mapping):
        raise TypeError("outputs: expected a variable, a pair of variable and op, or a list of these, got a dict")
    variables, ops = [], []
    for output in [outputs] if is_single_output(outputs) else outputs:
        if _is_output_with_op(output):
            variables.append(output[0])
            ops.append(output[1])
        elif isinstance(output, tuple):
            raise TypeError(f"outputs: expected a variable or a pair of variable and op, got {output!r}")
        else:
            variables.append(output)
            ops.append("avg")
    return variables, ops


def _is_output_with_op(output: object) -> bool:
    return isinstance(output, tuple) and len(output) == 2 and (output[1] is None or isinstance(output[1], str))


def is_single_output(outputs: object) -> bool:
    """Whether the argument ``outputs`` is a single output rather than a list."""
    return outputs is not None and (not isinstance(outputs, list | tuple) or _is_output_with_op(outputs))


def _find_library(**arguments: list[Any]) -> GraphLibrary:
    """Return the graph library of the variables in all arguments.  Raise TypeError if there are several."""
    library: GraphLibrary | None = None
    for name, values in arguments.items():
        for value in values:
            variable = getattr(value, "variable", value)  # of an In or an Out
            try:
                library_of_variable = get_library(variable)
            except TypeError as error:
                raise TypeError(f"{name}: {error}") from None
            if library is not None and library_of_variable is not library:
                raise TypeError(
                    f"{name}: {variable!r} is {library_of_variable.name}'s, but other arguments are {library.name}'s"
                )
            library = library_of_variable
    if library is None:
        loaded = list_loaded_libraries()
        if len(loaded) != 1:
            raise TypeError("inputs, outputs and updates are all empty: no variable tells PyTensor from Theano")
        return loaded[0]
    return library


def _convert_replacement(library: GraphLibrary, target: Any, value: object, name: str) -> Variable:
    """Return an expression or a constant as a variable of the type of ``target``, which it replaces."""
    try:
        return library.convert_to_type_of(target, value)
    except (TypeError, ValueError, AttributeError) as error:
        raise TypeError(f"{name}: {describe(target)} of type {target.type} can't take {value!r}: {error}") from None


def _check_free_variables(library: GraphLibrary, specs: Any, outputs: Any, updates: Any, givens: Any) -> None:
    """Raise ValueError if an expression depends on a variable that is neither input, given, constant nor shared."""
    visited = {id(spec.variable) for spec in specs} | {id(key) for key, _ in givens}
    needed = [
        *(("givens", value) for _, value in givens),
        *(("outputs", library.get_output_variable(output)) for output in outputs),
        *(("updates", expression) for _, expression in updates),
    ]
    for name, expression in needed:
        stack = [expression]
        while stack:
            variable = stack.pop()
            if id(variable) in visited:
                continue
            visited.add(id(variable))
            if variable.owner is not None:
                stack.extend(variable.owner.inputs)
            elif not library.is_shared(variable) and not library.is_constant(variable):
                raise ValueError(f"{name}: {describe(variable)} is not an input, but {expression} is computed from it")


def _parse_input(library: GraphLibrary, value: object, name: str, allow_downcast: bool | None) -> InputSpec:
    """Return the specification of an input.  Raise TypeError or ValueError for a variable that can't be one."""
    spec = library.make_input_spec(value)
    if library.is_variable(value):  # an `In` has an ``allow_downcast`` of its own
        spec = replace(spec, allow_downcast=allow_downcast)
    if library.is_shared(spec.variable):
        raise TypeError(f"{name}: {describe(spec.variable)} is a shared variable and can't be passed")
    if spec.variable.owner is not None:
        raise ValueError(
            f"{name}: {describe(spec.variable)} is computed from others and can't be passed; pass a new variable of "
            "its type, and replace it by that one in givens"
        )
    if hasattr(spec.variable.type, "format"):
        raise TypeError(
            f"{name}: {describe(spec.variable)} is sparse, and inputs have to be dense arrays: pass its data, "
            "indices, indptr and shape as bcast_inputs and make a CSR or CSC of them, or keep it in a shared variable"
        )
    if not library.is_array(spec.variable) or np.dtype(spec.variable.type.dtype).kind not in "biufc":
        raise TypeError(f"{name}: expected variables whose values are arrays, got {spec.variable.type}")
    if getattr(value, "update", None) is not None:
        raise ValueError(f"{name}: {describe(spec.variable)} has an update of its own; use a shared variable")
    return spec


def parse_op(op: object, argument: str) -> str | None:
    """Return the name of an op: a key of `REDUCE_OPS`, or None.  Raise TypeError or ValueError that name the argument.

    The prefix ``c_`` is dropped.  With it, scripts of 2017 ask for a reduction in host memory, as all outputs have now.
    """
    if op is None:
        return None
    expected = ", ".join(map(repr, REDUCE_OPS)) + " or None"
    if not isinstance(op, str):
        raise TypeError(f"{argument}: expected an op ({expected}), got {op!r}")
    name = op.removeprefix("c_")
    if name not in REDUCE_OPS:
        raise ValueError(f"{argument}: expected an op ({expected}), got {op!r}")
    return name


def _parse_output_op(library: GraphLibrary, output: object, op: object, position: int) -> str | None:
    """Return the op of an output.  Raise TypeError or ValueError if the output can't be reduced by it."""
    parsed = parse_op(op, f"outputs: the op of output {position}")
    variable = library.get_output_variable(output)
    if parsed is None:
        return None
    if not library.is_array(variable):
        raise TypeError(f"outputs: output {position} of type {variable.type} can't be reduced; use op None")
    dtype = np.dtype(variable.type.dtype)
    if not REDUCE_OPS[parsed].can_reduce(dtype):
        is_bool = dtype.kind == "b"
        alternatives = "'max' (any), 'min' (all), 'gather'" if is_bool else ", ".join(map(repr, list_ops(dtype)))
        raise ValueError(
            f"outputs: op {op!r} of output {position} is not defined for dtype {dtype}; "
            f"choose {alternatives} or None, or cast the output"
        )
    return parsed


def _resolve_mode(library: GraphLibrary, mode: Any, device: Device) -> Mode:
    """Return a mode, by default that of functions on the device.  Raise ValueError or TypeError if there is none."""
    modes = library.package.compile.mode
    name = mode
    if mode is None:
        name = device.default_mode or library.package.config.mode
    try:
        resolved = modes.get_mode(name)
    except Exception as error:  # Theano raises Exception itself
        raise ValueError(f"mode: {library.name} has no mode {name!r}: {error}") from None
    if not isinstance(resolved, modes.Mode):
        raise TypeError(f"mode: expected a mode of {library.name}, or the name of one, got {name!r}")
    if isinstance(name, str) and name.upper() in ("MODE", "FAST_RUN"):  # they depend on further settings
        return next((name for name, predefined in modes.predefined_modes.items() if predefined is resolved), resolved)
    return name


def _check_kwargs(library: GraphLibrary, kwargs: dict[str, Any]) -> None:
    try:
        inspect.signature(library.package_function).bind([], [], updates=[], givens=[], **kwargs)
    except TypeError as error:
        raise TypeError(f"{library.name}.function: {error}") from None
