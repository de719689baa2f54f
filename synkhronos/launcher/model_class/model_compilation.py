"""Compilation of a model's functions, and the choice between gradients and parameters for the exchange under BSP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from synkhronos.exchange_rules import ExchangeRule
from synkhronos.launcher.configuration.settings import Settings
from synkhronos.launcher.model_class.model import Model
from synkhronos.launcher.model_class.model_interface import ModelInterfaceError, call_by_signature, shorten_repr

#: Quantity that ranks exchange after each step.
ExchangedQuantity = Literal["gradient", "params"]


def _compile_functions(model: Any, sync_type: str) -> None:
    """Call ``compile_iter_fns``, with ``sync_type`` if it has this parameter.

    Theano-MPI calls the exchange of gradients "cdd", and the exchange of parameters "avg".  If ``size > 1``, its models
    compile a function for gradients and one for updates, which only "cdd" can use.  For "avg", ``size`` is therefore 1
    during the call.
    """
    size = getattr(model, "size", 1)
    if sync_type != "cdd" and size != 1:
        model.size = 1
    try:
        call_by_signature(model.compile_iter_fns, sync_type=sync_type)
    finally:
        if sync_type != "cdd" and size != 1:
            model.size = size


def set_model_options(model: Any, options: Mapping[str, Any], exchange_rule: ExchangeRule, name: str) -> None:
    """Set the options of a `Model`'s step; raise ModelInterfaceError if one is wrong, or the class or exchange rule."""
    if not isinstance(model, Model):
        if options:
            raise ModelInterfaceError(f"model_options: {name} lacks:\n  the base class synkhronos.launcher.Model")
        return
    try:
        model.set_options(options)
    except (TypeError, ValueError) as error:
        raise ModelInterfaceError(f"{name}: {error}") from None
    for option in model.step_options.non_defaults:
        if not exchange_rule.is_bulk_synchronous:
            raise ModelInterfaceError(f"{option}: needs the exchange rule BSP, got {exchange_rule!r}")
        if exchange_rule.precision is not None:
            raise ModelInterfaceError(
                f"{option}: BSP has to exchange gradients in their own precision, got {exchange_rule!r}"
            )


def requires_gradient_exchange(model: Any) -> bool:
    """Return True if the step of a `synkhronos.launcher.Model` has options that need the gradient of all ranks."""
    return isinstance(model, Model) and bool(model.step_options.non_defaults)


def compile_model(model: Any, settings: Settings, exchange_rule: ExchangeRule, size: int) -> ExchangedQuantity | None:
    """Compile an instance's functions.  Return the quantity that ranks exchange after each step, or None."""
    quantity = _choose_exchanged_quantity(model, settings, exchange_rule, size)
    _compile_functions(model, "cdd" if quantity == "gradient" else "avg")
    if quantity != "gradient":
        return quantity
    vels, vels2 = getattr(model, "vels", None), getattr(model, "vels2", None)
    if settings.rule_options.get("average") is None and not vels and not vels2:
        return "params"  # the class has compiled whole steps even for "cdd"
    _check_gradient_variables(vels, vels2, bool(getattr(model, "sharded_variables", None)), settings.modelclass)
    return "gradient"


def _choose_exchanged_quantity(
    model: Any, settings: Settings, exchange_rule: ExchangeRule, size: int
) -> ExchangedQuantity | None:
    """Return the quantity to exchange after each step under BSP, or None if ranks do not exchange after each step.

    The option ``average`` of BSP decides.  By default ranks exchange parameters if the class is a `Model` whose
    step has no options, and gradients for any other class.
    """
    requires_gradient = requires_gradient_exchange(model)
    if not requires_gradient and (not exchange_rule.is_bulk_synchronous or size == 1):
        return None
    average = settings.rule_options.get("average")
    if average == "params" and requires_gradient:
        raise ModelInterfaceError(
            f"{next(iter(model.step_options.non_defaults))}: needs rule_options.average = 'gradient', got 'params'"
        )
    exchanges_params_by_default = isinstance(model, Model) and not requires_gradient
    return "params" if average == "params" or (average is None and exchanges_params_by_default) else "gradient"


def _check_gradient_variables(vels: Any, vels2: Any, is_sharded: bool, model_name: str) -> None:
    """Raise ModelInterfaceError unless both are lists of variables, of equal types and shapes if not ``is_sharded``."""
    kinds, kinds2 = (
        [(p.type.dtype, np.shape(p.get_value())) for p in variables] if variables else [] for variables in (vels, vels2)
    )
    if not kinds or (kinds != kinds2 and not is_sharded):
        raise ModelInterfaceError(
            f"{model_name}: missing or invalid:\n  attributes vels and vels2: expected lists of shared variables of "
            f"the same shapes, got {shorten_repr(vels)} and {shorten_repr(vels2)}; or give "
            "--set rule_options.average=params"
        )
