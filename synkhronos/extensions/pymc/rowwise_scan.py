"""Rewriting of a loop (`pytensor.scan`) so that it computes some rows only.

There are two forms.  In the first, each step computes a row, and no step depends on another.  In the second, the steps
are points in time, and the states have an element for each row:

.. code-block:: text

   rows as steps                           rows side by side
     row 0 ─▶ step 0 ─▶ terms of row 0       row 0   x[0, 0] ─▶ h[0, 0] ─▶ h[1, 0] ─▶ ...
     row 1 ─▶ step 1 ─▶ terms of row 1       row 1   x[0, 1] ─▶ h[0, 1] ─▶ h[1, 1] ─▶ ...

The second needs a search within the graph of a step, which ends at the graph's inputs.  If it reaches a state, the next
value of this state is searched, too, until no further state is reached.  Then the initial states and the sequences are
searched outside of the loop.
"""

from __future__ import annotations

from collections.abc import KeysView, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pytensor.compile import SharedVariable
from pytensor.graph.basic import Constant
from pytensor.scan.op import Scan
from pytensor.tensor import TensorType

from synkhronos.extensions.pymc.row_restrictor import NotRowwiseError, RowRestrictor, list_leaves
from synkhronos.variable_types import Node, Variable

__all__ = ["restrict_scan"]


def restrict_scan(restrictor: RowRestrictor, node: Node, axis: int) -> list[Variable | NotRowwiseError]:
    """Return the outputs of a loop for the computed rows.

    In place of an output without rows along `axis` there is a `NotRowwiseError`.
    """
    positions = [i for i, output in enumerate(node.outputs) if getattr(output.type, "ndim", 0) > axis]
    results: list[Any] = [NotRowwiseError(f"{output} has no rows on axis {axis}") for output in node.outputs]
    try:
        for position, output in _LoopBuilder(restrictor, node).restrict_outputs(positions, axis).items():
            results[position] = output
    except NotRowwiseError:
        # Some outputs may have their rows on another axis.
        for position in positions:
            try:
                results[position] = _LoopBuilder(restrictor, node).restrict_outputs([position], axis)[position]
            except NotRowwiseError as error:
                results[position] = error
    return results


@dataclass(eq=False)
class _LoopInput:
    """An input of a loop, and the inputs of the graph of a step that have its values.

    Attributes
    ----------
    outer : variable
        The loop's input: a sequence, the initial values of a state, or an input that is the same at all steps.
    inner : list of variable
        Inputs of the graph of a step; a state has one for each earlier step that is read.
    taps : tuple of int
        These earlier steps.  Empty for other inputs.
    has_steps : bool
        Whether axis 0 of ``outer`` are the steps.
    row_axis : int or None
        Axis of the inner inputs that runs along the rows.
    """

    outer: Any
    inner: list[Any]
    taps: tuple[int, ...]
    has_steps: bool
    row_axis: int | None = None


class _StepRestrictor(RowRestrictor):
    """Search in the graph of one step of a loop.

    Parameters
    ----------
    restrictor : RowRestrictor
        The restrictor of the graph that contains the loop.
    loop_inputs : list of _LoopInput
        The loop's inputs.  The search sets ``row_axis`` of those that it reaches, and replaces the inner variables.
    """

    def __init__(self, restrictor: RowRestrictor, loop_inputs: Sequence[_LoopInput]):
        super().__init__(restrictor.length, restrictor.rules, selections=restrictor.selections)
        self.use_data_of(restrictor)
        self._input_by_variable = {
            v: (loop_input, i) for loop_input in loop_inputs for i, v in enumerate(loop_input.inner)
        }

    def _restrict_data(self, variable: Variable, axis: int) -> Variable:
        """Replace an input of the graph of a step.  Data within the graph are replaced as everywhere."""
        if variable not in self._input_by_variable:
            return super()._restrict_data(variable, axis)
        loop_input, position = self._input_by_variable[variable]
        if loop_input.row_axis not in (None, axis):
            raise NotRowwiseError(f"{loop_input.outer}, of a loop, has its rows on two axes")
        loop_input.row_axis = axis
        shape = [None if i == axis else length for i, length in enumerate(variable.type.shape)]
        loop_input.inner[position] = TensorType(variable.type.dtype, tuple(shape))(variable.name)
        return loop_input.inner[position]


class _LoopBuilder:
    """Builds a loop over the computed rows from a loop over all of them."""

    def __init__(self, restrictor: RowRestrictor, node: Node):
        self._restrictor, self._node = restrictor, node
        op, info = node.op, node.op.info
        if info.n_mit_mot or info.n_untraced_sit_sot:
            raise NotRowwiseError(f"{op} is the gradient of a loop, or draws random numbers")
        graph = op.fgraph.unfreeze() if hasattr(op.fgraph, "unfreeze") else op.fgraph  # since 3.1
        taps = (*info.mit_sot_in_slices, *info.sit_sot_in_slices)
        self._n_states = len(taps)
        self._n_steps, *outer = node.inputs
        inner = list(graph.inputs)

        def take_input(taps: tuple[int, ...], has_steps: bool) -> _LoopInput:
            variables = [inner.pop(0) for _ in taps or [0]]
            return _LoopInput(outer.pop(0), variables, taps, has_steps)

        self._sequences = [take_input((), True) for _ in range(info.n_seqs)]
        self._states = [take_input(state_taps, True) for state_taps in taps]
        del outer[: info.n_nit_sot]  # the numbers of steps of further outputs
        self._non_sequences = [take_input((), False) for _ in range(info.n_non_seqs)]
        self._outputs = list(graph.outputs[: len(node.outputs)])
        self._conditions = list(graph.outputs[len(node.outputs) :])

    def restrict_outputs(self, positions: Sequence[int], axis: int) -> dict[int, Any]:
        """Return the outputs at some positions, with the computed rows along an axis, by their positions."""
        if axis == 0:
            return self._restrict_steps(positions)
        inputs = [*self._sequences, *self._states, *self._non_sequences]
        original_variables = {id(loop_input): list(loop_input.inner) for loop_input in inputs}
        step = _StepRestrictor(self._restrictor, inputs)
        pending: dict[int, int | None] = dict.fromkeys(positions, axis - 1)
        outputs: dict[int, Any] = {}
        while pending:
            for position, row_axis in pending.items():
                value = self._outputs[position]
                outputs[position] = value if row_axis is None else step.restrict(value, row_axis)
                if position < self._n_states and row_axis is not None:
                    state = self._states[position]
                    for variable in original_variables[id(state)]:
                        step.restrict(variable, row_axis)
                    outputs[position] = state.inner[0].type.filter_variable(outputs[position])
            read_variables = list_leaves([*outputs.values(), *self._conditions])
            pending = {
                i: state.row_axis
                for i, state in enumerate(self._states)
                if i not in outputs and not read_variables.isdisjoint(state.inner)
            }
        for loop_input in inputs:
            if loop_input.row_axis is not None and not read_variables.isdisjoint(original_variables[id(loop_input)]):
                raise NotRowwiseError(f"{self._node.op} mixes rows, or its number of steps depends on them")
        return self._make_loop(outputs, read_variables, self._n_steps)

    def _restrict_steps(self, positions: Sequence[int]) -> dict[int, Any]:
        """Return outputs of a loop whose steps are the rows."""
        outputs = {i: self._outputs[i] for i in positions}
        read_variables = list_leaves(outputs.values())
        if (
            self._conditions
            or any(i < self._n_states for i in positions)
            or any(not read_variables.isdisjoint(state.inner) for state in self._states)
        ):
            raise NotRowwiseError(f"{self._node.op} mixes rows: a row depends on the rows before")
        for loop_input in self._non_sequences:
            if isinstance(loop_input.outer, SharedVariable) and not read_variables.isdisjoint(loop_input.inner):
                raise NotRowwiseError(f"each step of {self._node.op} reads {loop_input.outer}: pass it as a sequence")
        return self._make_loop(outputs, read_variables, self._restrictor.n_rows_variable, steps_are_rows=True)

    def _make_loop(
        self, outputs: dict[int, Any], read_variables: KeysView[Any], n_steps: Any, steps_are_rows: bool = False
    ) -> dict[int, Any]:
        """Return the outputs of a loop with these outputs of a step, which read ``read_variables``."""

        def restrict(loop_input: _LoopInput) -> Variable:
            if steps_are_rows and loop_input.has_steps:
                return self._restrictor.restrict(loop_input.outer, 0)
            if loop_input.row_axis is None:
                return loop_input.outer
            return self._restrictor.restrict(loop_input.outer, loop_input.row_axis + loop_input.has_steps)

        positions = sorted(outputs)
        states = [self._states[i] for i in positions if i < self._n_states]
        n_others = len(outputs) - len(states)
        sequences, non_sequences = (
            [loop_input for loop_input in inputs if not read_variables.isdisjoint(loop_input.inner)]
            for inputs in (self._sequences, self._non_sequences)
        )
        inner = [v for loop_input in (*sequences, *states, *non_sequences) for v in loop_input.inner]
        # Data within the graph of a step, and the number of rows.
        captured = [v for v in read_variables if v not in inner and not isinstance(v, Constant)]
        op = self._node.op
        info = replace(
            op.info,
            n_seqs=len(sequences),
            mit_sot_in_slices=tuple(state.taps for state in states if state in self._states[: op.info.n_mit_sot]),
            sit_sot_in_slices=tuple(state.taps for state in states if state in self._states[op.info.n_mit_sot :]),
            n_nit_sot=n_others,
            n_non_seqs=len(non_sequences) + len(captured),
        )
        values = [outputs[i] for i in positions]
        loop = Scan(
            [*inner, *captured],
            [*values, *self._conditions],
            info,
            mode=op.mode,
            truncate_gradient=op.truncate_gradient,
            name=op.name,
            allow_gc=op.allow_gc,
        )
        results = loop(
            n_steps,
            *map(restrict, (*sequences, *states)),
            *[n_steps] * n_others,
            *map(restrict, non_sequences),
            *captured,
            return_list=True,
        )
        return dict(zip(positions, results, strict=True))
