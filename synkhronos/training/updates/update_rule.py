"""The decorator `update_rule`, which turns the formula of an optimizer for one parameter into an update rule for all.

The decorator adds the checks, the flat gradient and the sections of the docstring.  `FormulaContext` has the operations
that formulas share.
"""

from __future__ import annotations

import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from synkhronos.graph_libraries import get_library
from synkhronos.training.updates.arguments import as_scalar
from synkhronos.training.updates.flat_gradient import FlatGradient
from synkhronos.training.updates.shared_variables import make_zero_state
from synkhronos.variable_types import Scalar, SharedVariable, Variable, Variables


class RuleUpdates(NamedTuple):
    """Result of an update rule; unpacks as ``grad_updates, param_updates, grad_shared``.

    Attributes
    ----------
    grad_updates : OrderedDict
        ``{grad_shared: expression}``: a function with these updates writes the rank's own gradient.
    param_updates : OrderedDict
        New values of the parameters and of the rule's own shared variables, from `grad_shared`.
    grad_shared : shared variable
        The concatenated gradients of all parameters, a vector; all-reduce it between the two functions.
    """

    grad_updates: OrderedDict[SharedVariable, Variable]
    param_updates: OrderedDict[SharedVariable, Variable]
    grad_shared: SharedVariable


#: Function of a loss, parameters and hyperparameters, among them ``weight``.
UpdateRule: TypeAlias = Callable[..., RuleUpdates]

#: Result of a formula: new values by shared variable.
NewValues: TypeAlias = Mapping[SharedVariable, Variable]

#: Descriptions of hyperparameters for docstrings.
HYPERPARAMETER_DESCRIPTIONS = {
    "learning_rate": "Size of a step.",
    "momentum": "Decay of the velocity per step.",
    "rho": "Decay of the running mean of squared gradients, per step.",
    "beta1": "Decay of the running mean of gradients, per step; in [0, 1).",
    "beta2": "Decay of the running mean of squared gradients, per step; in [0, 1).",
    "epsilon": "Term that keeps the divisor positive.",
    "mask": "Predicate of a parameter: whether it decays.  Default: all parameters decay.",
}

_GRADIENTS_DOC = """loss_or_grads : scalar variable, or list of variables
    A loss, or its gradients, one for each parameter.
params : list of shared variables
    Parameters: shared variables of floats."""
_WEIGHT_DOC = """weight : number or symbolic scalar, optional
    Weight of this rank's gradient in the mean over ranks, such as ``x.shape[0]``.  Default: equal weights."""
_RULE_RETURNS_DOC = """RuleUpdates
    ``(grad_updates, param_updates, grad_shared)``; see `synkhronos.training.updates`."""


class FormulaContext:
    """Operations that a formula uses for one parameter; ``c(value)`` is a number or scalar in the parameter's dtype."""

    def __init__(
        self, flat: FlatGradient, param: SharedVariable, common_updates: OrderedDict[SharedVariable, Variable]
    ):
        self.tensor = flat.tensor
        self._flat = flat
        self._param = param
        self._common_updates = common_updates

    def __call__(self, value: Scalar) -> Variable:
        """Convert a hyperparameter to a scalar of the parameter's dtype."""
        return as_scalar(value, self._param)

    def zeros(self, name: str) -> SharedVariable:
        """Make a shared variable of zeros, of the parameter's shape, for the state of the rule."""
        return make_zero_state(self._param, name)

    @property
    def t(self) -> Variable:
        """Number of this step, from 1: a symbolic scalar in the dtype of the flat gradient."""
        if not self._common_updates:
            # In float32 the counter stops at 2**24, long after Adam's corrections have become 1.
            counter = get_library(self._flat.shared).shared(np.zeros((), self._flat.shared.dtype), name="t")
            self._common_updates[counter] = counter + as_scalar(1, counter)
        return next(iter(self._common_updates.values()))


def update_rule(example: str, result: float, **descriptions: str) -> Callable[[Callable[..., Any]], UpdateRule]:
    """Return a decorator that turns a formula for one parameter into an update rule.

    The formula is called as ``formula(p, g, c, *hyperparameters)`` for each parameter `p`, with its gradient `g` after
    the all-reduce and a `FormulaContext` `c`.  It returns the new values of `p` and of its state, by shared variable.

    Parameters
    ----------
    example : str
        Hyperparameters in the example of the docstring, one step on the loss ``w**2`` from ``w = 3``.
    result : float
        Value of ``w`` after this step.
    **descriptions : str
        Descriptions of hyperparameters that ``HYPERPARAMETER_DESCRIPTIONS`` lacks, or describes otherwise.

    Returns
    -------
    callable
        Decorator.  The update rule has the formula's hyperparameters, preceded by `loss_or_grads` and `params` and
        followed by `weight`; it checks all of them.
    """

    def decorate(formula: Callable[..., Any]) -> UpdateRule:
        hyperparameters = list(inspect.signature(formula).parameters.values())[3:]
        signature = inspect.signature(_declare_common_arguments)
        *gradients, weight = signature.parameters.values()
        signature = signature.replace(parameters=[*gradients, *hyperparameters, weight])

        @functools.wraps(formula)
        def apply_to_all(*args: Any, **kwargs: Any) -> RuleUpdates:
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{formula.__name__}() {error}") from None
            bound.apply_defaults()
            scalars = bound.arguments
            loss_or_grads, params, weight = (scalars.pop(name) for name in ("loss_or_grads", "params", "weight"))
            if not (scalars.get("mask") is None or callable(scalars["mask"])):
                raise TypeError(f"mask: expected a predicate of a parameter, got {scalars['mask']!r}")
            numbers = {name: value for name, value in scalars.items() if name != "mask"}
            flat = FlatGradient(loss_or_grads, params, weight, **numbers)
            common_updates: OrderedDict[Any, Any] = OrderedDict()
            # The dict is an OrderedDict, because Theano warns of a plain dict.
            updates: OrderedDict[Any, Any] = OrderedDict()
            for p, g in zip(flat.params, flat.iterate_gradients(), strict=True):
                updates.update(formula(p, g, FormulaContext(flat, p, common_updates), **scalars))
            return RuleUpdates(OrderedDict([(flat.shared, flat.expression)]), common_updates | updates, flat.shared)

        lines = [_GRADIENTS_DOC, *(format_hyperparameter(p, descriptions) for p in hyperparameters), _WEIGHT_DOC]
        call = f"{formula.__name__}(w**2, [w], {example})"
        add_docstring_sections(apply_to_all, lines, _RULE_RETURNS_DOC, call, result)
        apply_to_all.__signature__ = signature  # type: ignore[attr-defined]
        return apply_to_all

    return decorate


def get_update_rule_name(rule: UpdateRule) -> str:
    """Return the name of an update rule, that of the function in a `functools.partial`."""
    function: Any = rule
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))


def to_rule_updates(rule: UpdateRule, result: object) -> RuleUpdates:
    """Convert a rule's result to `RuleUpdates`.  Raise TypeError for anything but a triple."""
    if not isinstance(result, tuple) or len(result) != 3:
        raise TypeError(
            f"update_rule: expected {get_update_rule_name(rule)} to return (grad_updates, param_updates, grad_shared), "
            f"got {result!r} of type {type(result).__name__}"
        )
    return RuleUpdates(*result)


def _declare_common_arguments(
    loss_or_grads: Variables, params: Iterable[SharedVariable], *, weight: Scalar | None = None
) -> RuleUpdates:
    """Declare the arguments that all rules have in common; only the signature is used."""
    raise NotImplementedError


def format_hyperparameter(p: inspect.Parameter, descriptions: Mapping[str, str]) -> str:
    """Return a hyperparameter's entry of the docstring.  Raise TypeError if it has no description."""
    description = descriptions.get(p.name) or HYPERPARAMETER_DESCRIPTIONS.get(p.name)
    if description is None:
        raise TypeError(f"update_rule: expected a description of {p.name}: update_rule(..., {p.name}='...')")
    optional = "" if p.default is p.empty else ", optional"
    kind = "callable" if p.name == "mask" else "number or symbolic scalar"
    return f"{p.name} : {kind}{optional}\n    {description}"


def add_docstring_sections(function: Any, parameters: list[str], returns: str, call: str, result: float) -> None:
    """Add the sections that the docstrings of all rules share."""
    summary, _, further_sections = inspect.cleandoc(function.__doc__).partition("\n\n")
    function.__doc__ = "\n\n".join(
        [
            summary,
            "Parameters\n----------\n" + "\n".join(parameters),
            f"Returns\n-------\n{returns}",
            "Raises\n------\nTypeError, ValueError\n    If an argument is not of these kinds; the message names it.",
            further_sections,
            "Examples\n--------\n"
            ">>> import pytensor\n"
            ">>> w = pytensor.shared(3.0)\n"
            f">>> updates = {call}\n"
            ">>> grad_updates, param_updates, grad_shared = updates\n"
            ">>> _ = pytensor.function([], updates=grad_updates)()\n"
            ">>> _ = pytensor.function([], updates=param_updates)()\n"
            ">>> print(w.get_value().round(4))\n"
            f"{result}",
        ]
    )
