"""Evaluation of a jaxpr in parts, to overlap communication with the backward pass.

XLA orders computations so that they need little memory.  A large gradient that only the update reads is computed last,
even if it could be computed first, and its all-reduce then overlaps nothing.  To leave XLA no other order, this module
makes the gradient that flows to earlier layers depend on the start of the all-reduce::

    layer 3's gradient ──> start of its all-reduce ──> token
    flow to layer 2 ─────────────── barrier(token) ──────────> layer 2's gradient ──> ...
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from synkhronos.variable_types import Array, Variable


class JaxprEvaluator:
    """Evaluates the equations of a function's jaxpr on request; the function returns a sequence of arrays.

    Parameters
    ----------
    n_forward_results : int
        Number of results at the start, such as the loss, that belong to the forward pass.  Values that these results
        need are never delayed, as XLA may compute them again where they are used.
    result_position : int
        Position of the result that is computed in parts.
    delayed_arguments : sequence of int
        Positions of arguments that `delay_until` delays, as it delays values that were computed from the arguments.

    Attributes
    ----------
    parts : list of jaxpr variables
        Arrays whose concatenation along the last axis is this result; the result itself if it is not a concatenation.
    """

    def __init__(
        self,
        function: Callable[..., Sequence[Any]],
        arguments: Sequence[Any],
        n_forward_results: int,
        result_position: int,
        delayed_arguments: Sequence[int] = (),
    ):
        import jax

        closed = jax.make_jaxpr(function)(*arguments)
        jaxpr = closed.jaxpr
        self._jaxpr = jaxpr = jaxpr.replace(eqns=_redirect_slices_to_parts(jaxpr.eqns))
        self._values = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        self._values.update(zip(jaxpr.invars, arguments, strict=True))
        #: For each variable, the index of the equation that computes it.
        self._equation_indexes = {variable: i for i, equation in enumerate(jaxpr.eqns) for variable in equation.outvars}
        self._traced_equations: set[int] = set()
        self._delayed_arguments = [jaxpr.invars[i] for i in delayed_arguments]
        self._forward_equations = self._find_untraced_equations(jaxpr.outvars[:n_forward_results])
        self.parts = self._find_parts(jaxpr.outvars[result_position])
        self._results = [*jaxpr.outvars[:result_position], None, *jaxpr.outvars[result_position + 1 :]]

    def compute(self, variables: Sequence[Variable]) -> list[Array]:
        """Return the values of variables.  Trace the equations that were not traced before."""
        from jax.extend import core

        untraced_equations = sorted(self._find_untraced_equations(variables))
        equations = [self._jaxpr.eqns[i] for i in untraced_equations]
        outputs = [v for equation in equations for v in equation.outvars if not isinstance(v, core.DropVar)]
        used = dict.fromkeys(v for equation in equations for v in equation.invars if not isinstance(v, core.Literal))
        inputs = [v for v in used if v in self._values]
        jaxpr = self._jaxpr.replace(constvars=[], invars=inputs, outvars=outputs, eqns=equations)
        computed = core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, ()))(*[self._values[v] for v in inputs])
        self._values.update(zip(outputs, computed, strict=True))
        self._traced_equations.update(untraced_equations)
        return [v.val if isinstance(v, core.Literal) else self._values[v] for v in variables]

    def delay_until(self, token: Array) -> Array:
        """Make the rest of the computation wait for a token.  Return a token of the same value."""
        import jax

        untraced_equations = self._find_untraced_equations([*self.parts, *filter(None, self._results)])
        used = {id(v) for i in untraced_equations for v in self._jaxpr.eqns[i].invars}
        flows = [
            v
            for v, i in self._equation_indexes.items()
            if i in self._traced_equations and i not in self._forward_equations and id(v) in used and v.aval.size > 1
        ]
        flows += [v for v in self._delayed_arguments if id(v) in used]
        delayed, token = jax.lax.optimization_barrier(([self._values[v] for v in flows], token))
        self._values.update(zip(flows, delayed, strict=True))
        return token

    def compute_results(self, vector: Array) -> list[Array]:
        """Trace the remaining equations, and return the function's results, with ``vector`` for the one in parts."""
        position = self._results.index(None)
        other_results = self.compute([v for v in self._results if v is not None])
        return [*other_results[:position], vector, *other_results[position:]]

    def _find_untraced_equations(self, variables: Sequence[Variable]) -> set[int]:
        """Return the indexes of the equations that must still be traced for variables."""
        from jax.extend import core

        untraced_equations: set[int] = set()
        remaining = list(variables)
        while remaining:
            variable = remaining.pop()
            index = None if isinstance(variable, core.Literal) else self._equation_indexes.get(variable)
            if index is not None and index not in untraced_equations and index not in self._traced_equations:
                untraced_equations.add(index)
                remaining += self._jaxpr.eqns[index].invars
        return untraced_equations

    def _find_parts(self, variable: Variable) -> list[Array]:
        """Return the arrays whose concatenation along the last axis a variable is."""
        from jax.extend import core

        index = None if isinstance(variable, core.Literal) else self._equation_indexes.get(variable)
        equation = None if index is None else self._jaxpr.eqns[index]
        if equation is None or equation.primitive.name != "concatenate":
            return [variable]
        if equation.params["dimension"] != variable.aval.ndim - 1:
            return [variable]
        return [part for operand in equation.invars for part in self._find_parts(operand)]


def _redirect_slices_to_parts(equations: Sequence[Any]) -> list[Any]:
    """Make each slice of a concatenation read the vector that contains the slice, so that it needs no other vector."""
    from jax.extend import core

    operands: dict[Any, list[Any]] = {}
    new_equations = []
    for equation in equations:
        name, (first, *_) = equation.primitive.name, equation.invars or [None]
        if name == "concatenate" and first.aval.ndim == 1:
            operands[equation.outvars[0]] = [
                part for v in equation.invars for part in ([v] if isinstance(v, core.Literal) else operands.get(v, [v]))
            ]
        elif name == "slice" and first in operands and equation.params["strides"] is None:
            (start,), (stop,) = equation.params["start_indices"], equation.params["limit_indices"]
            for part in operands[first]:
                if start >= 0 and stop <= part.aval.size:
                    params = {**equation.params, "start_indices": (start,), "limit_indices": (stop,)}
                    equation = equation.replace(invars=[part], params=params)
                    break
                start, stop = start - part.aval.size, stop - part.aval.size
        new_equations.append(equation)
    return new_equations
