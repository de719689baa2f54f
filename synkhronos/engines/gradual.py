"""A function that XLA compiles, traced bit by bit.

`Gradual`
    Has what comes later in the backward pass wait for what was begun with its results so far.

XLA orders what it computes so that little memory is taken.  Of a large gradient, which nobody needs before the update,
it computes last what could be computed first; an exchange that starts when it is there has nothing left to hide behind.
So the gradient that flows on to the layers below depends on the start of the exchange: XLA then finds no other order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


class Gradual:
    """A function of arrays, computed as far as values are asked for; both are being traced.

    Parameters
    ----------
    run : callable
        Takes arrays, returns a sequence of them.
    arguments : list of jax.Array
    n_forward : int
        How many of the first results are of the forward pass, such as a loss: what they are computed from waits for
        nothing, as XLA may compute it again where it is used.
    vector : int
        The position, behind these, of the result whose `parts` are asked for in the place of it.

    Attributes
    ----------
    parts : list of variables
        The vectors that this result is put together from, one after another; else itself.
    """

    def __init__(self, run: Callable[..., Sequence[Any]], arguments: Sequence[Any], n_forward: int, vector: int):
        import jax

        closed = jax.make_jaxpr(run)(*arguments)
        self._program = program = closed.jaxpr
        self._values = dict(zip(program.constvars, closed.consts, strict=True))
        self._values.update(zip(program.invars, arguments, strict=True))
        #: Which equation computes a variable.
        self._source = {variable: i for i, equation in enumerate(program.eqns) for variable in equation.outvars}
        self._done: set[int] = set()
        self._forward = self._missing(program.outvars[:n_forward])
        self.parts = self._joined(program.outvars[vector])
        self._results = [*program.outvars[:vector], None, *program.outvars[vector + 1 :]]

    def values(self, variables: Sequence[Any]) -> list[Any]:
        """Return variables' values, computing what is missing for these and nothing else."""
        from jax.extend import core

        missing = sorted(self._missing(variables))
        equations = [self._program.eqns[i] for i in missing]
        made = [v for equation in equations for v in equation.outvars if not isinstance(v, core.DropVar)]
        taken = dict.fromkeys(v for equation in equations for v in equation.invars if not isinstance(v, core.Literal))
        given = [v for v in taken if v in self._values]
        part = self._program.replace(constvars=[], invars=given, outvars=made, eqns=equations)
        computed = core.jaxpr_as_fun(core.ClosedJaxpr(part, ()))(*[self._values[v] for v in given])
        self._values.update(zip(made, computed, strict=True))
        self._done.update(missing)
        return [v.val if isinstance(v, core.Literal) else self._values[v] for v in variables]

    def hold(self, number: Any) -> Any:
        """Have the backward pass go on only when XLA has computed a number; return that number."""
        import jax

        missing = self._missing([*self.parts, *filter(None, self._results)])
        used = {id(v) for i in missing for v in self._program.eqns[i].invars}
        flows = [
            v
            for v, i in self._source.items()
            if i in self._done and i not in self._forward and id(v) in used and v.aval.size > 1
        ]
        held, number = jax.lax.optimization_barrier(([self._values[v] for v in flows], number))
        self._values.update(zip(flows, held, strict=True))
        return number

    def results(self, vector: Any) -> list[Any]:
        """Return the function's results, this vector among them."""
        at = self._results.index(None)
        others = self.values([v for v in self._results if v is not None])
        return [*others[:at], vector, *others[at:]]

    def _missing(self, variables: Sequence[Any]) -> set[int]:
        """Return which equations have to be computed for some variables, and are not yet."""
        from jax.extend import core

        missing: set[int] = set()
        left = list(variables)
        while left:
            variable = left.pop()
            i = None if isinstance(variable, core.Literal) else self._source.get(variable)
            if i is not None and i not in missing and i not in self._done:
                missing.add(i)
                left += self._program.eqns[i].invars
        return missing

    def _joined(self, variable: Any) -> list[Any]:
        """Return what a vector is put together from."""
        from jax.extend import core

        i = None if isinstance(variable, core.Literal) else self._source.get(variable)
        if i is None or self._program.eqns[i].primitive.name != "concatenate" or variable.aval.ndim != 1:
            return [variable]
        return [part for each in self._program.eqns[i].invars for part in self._joined(each)]
