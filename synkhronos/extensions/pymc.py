"""PyMC models whose likelihoods are computed by all ranks.

`data_parallel`
    A copy of a model in which the ranks compute what the observed rows contribute.

PyMC is imported when it is called, not before.
"""

from __future__ import annotations

import warnings
from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pymc

__all__ = ["data_parallel"]


def data_parallel(model: pymc.Model) -> pymc.Model:
    """Return a copy of a model whose observed rows are shared out among the ranks.

    An observed variable is split if its log-density is a sum over rows, and each row's depends on that row alone: of
    the observed values, of ``pm.Data``, and of arrays in the model that are as long.  Parameters, priors and all else
    stay in this process, and the copy is used as the model is: ``pm.sample``, ``pm.find_MAP`` and ``pm.fit`` run as
    before, and whenever they ask for the density or its gradient, all ranks compute.

    Parameters
    ----------
    model : pymc.Model
        It stays as it is.  The copy has data containers of its own: ``pm.set_data`` of one does not change the other.

    Returns
    -------
    pymc.Model
        To be used in a ``with`` statement.  In the place of each observed variable that is split it has a potential of
        that name.

    Raises
    ------
    TypeError
        If `model` is no model.
    ValueError
        If nothing can be split; the message says why, for each observed variable.

    Warns
    -----
    UserWarning
        For each observed variable that stays in this process because it can't be split; it says why.

    Notes
    -----
    Call `synkhronos.fork` before sampling, and pass ``cores=1`` to ``pm.sample``: chains run one after another, each on
    all ranks.  What needs the observed variables themselves is done with the model, not with the copy:
    ``pm.sample_posterior_predictive`` and ``pm.compute_log_likelihood``.

    Examples
    --------
    >>> import numpy as np, pymc as pm, synkhronos as synk
    >>> n = synk.fork(2, use_gpu=False)
    >>> with pm.Model() as model:
    ...     center = pm.Normal("center")
    ...     _ = pm.Normal("y", center, observed=np.arange(5.0))
    >>> with data_parallel(model):
    ...     found = pm.find_MAP(progressbar=False)
    >>> round(float(found["center"]), 3)
    1.667
    >>> synk.close()
    """
    import pymc as pm
    from pymc.model.fgraph import clone_model

    from synkhronos.extensions.by_rows import Mixed
    from synkhronos.extensions.rows_sum import sum_over_rows

    if not isinstance(model, pm.Model):
        raise TypeError(f"model: expected a pymc.Model, got {model!r}")
    made = clone_model(model)
    made.check_bounds = model.check_bounds
    _order_as(made, model)
    reasons = {}
    for variable in list(made.observed_RVs):
        try:
            terms, rows = _split(made, variable)
        except Mixed as error:
            reasons[variable.name] = str(error)
            continue
        _remove(made, variable)
        total = sum_over_rows(terms, rows, name=variable.name)
        # As Ctrl-C is: a sampler returns the draws so far.
        total.owner.op.rows.deaths_interrupt = True
        with made:
            pm.Potential(variable.name, total)
    if not model.observed_RVs:
        raise ValueError("model: it has no observed variables")
    if len(reasons) == len(model.observed_RVs):
        each = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        raise ValueError(f"model: no observed variable can be split by rows: {each}")
    for name, reason in reasons.items():
        warnings.warn(f"{name} is not split by rows, and is computed by this process alone: {reason}", stacklevel=2)
    return made


def _order_as(made: pymc.Model, model: pymc.Model) -> None:
    """Give a copy's variables the model's order: samplers draw for them in turn."""
    for name in ("free_RVs", "observed_RVs", "deterministics", "potentials"):
        place = {variable.name: i for i, variable in enumerate(getattr(model, name))}
        getattr(made, name).sort(key=lambda variable: place[variable.name])  # noqa: B023 - used at once


def _split(model: pymc.Model, variable: Any) -> tuple[Any, dict[Any, Any]]:
    """Return an observed variable's terms by rows, and the rows."""
    from pymc.logprob.utils import CheckParameterValue

    from synkhronos.extensions.by_rows import Mixed, by_rows
    from synkhronos.graphs import library_of

    used_by = [
        other.name
        for other in (*model.basic_RVs, *model.deterministics, *model.potentials)
        if other is not variable and any(variable in node.inputs for node in library_of(other).nodes([other]))
    ]
    if used_by:
        raise Mixed(f"{', '.join(used_by)} depends on it")
    observed = model.rvs_to_values[variable]
    shape = observed.shape.eval()
    if not len(shape) or shape[0] < 2:
        raise Mixed(f"it has shape {tuple(map(int, shape))}, and so no rows to share out")

    def checked(search: Any, node: Any, axis: int) -> Any:
        value, *conditions = node.inputs
        value = search.rows(value, axis)
        conditions = [search.condition(condition) for condition in conditions]
        return _with_check(node.op, value, conditions, model.check_bounds)

    try:
        terms = _log_density(model, variable)
    except NotImplementedError as error:
        raise Mixed(f"PyMC has no log-density of it: {error}") from error
    return by_rows(terms, int(shape[0]), {CheckParameterValue: checked})


def _log_density(model: pymc.Model, variable: Any) -> Any:
    """Return an observed variable's log-density by elements, as an expression of the model's random variables."""
    from pymc.logprob.basic import transformed_conditional_logp

    from synkhronos.extensions.rows_sum import rebuilt
    from synkhronos.graphs import library_of

    # PyMC rewrites what it derives a density from, and would replace random variables by copies: it gets others.
    values = {rv: rv.type(rv.name) for rv in model.free_RVs}
    values |= {rv: model.rvs_to_values[rv] for rv in model.observed_RVs}
    (terms,) = transformed_conditional_logp(
        rvs=[variable], rvs_to_values=values, rvs_to_transforms=dict.fromkeys(values), jacobian=True
    )
    variables = {value: rv for rv, value in values.items() if rv in model.free_RVs}
    return rebuilt(terms, library_of(terms).nodes([terms]), variables)


def _with_check(op: Any, value: Any, conditions: list[Any], check_bounds: bool) -> Any:
    """Return what PyMC makes of a check of parameters when it compiles a model."""
    import pytensor.tensor as pt

    if not op.can_be_replaced_by_ninf:
        return op(value, *conditions)
    if not check_bounds:
        return value
    return pt.switch(reduce(pt.and_, conditions), value, -np.inf)


def _remove(model: pymc.Model, variable: Any) -> None:
    """Take an observed variable out of a model."""
    value = model.rvs_to_values.pop(variable)
    del model.values_to_rvs[value]
    model.rvs_to_transforms.pop(variable, None)
    model.rvs_to_initial_values.pop(variable, None)
    model.observed_RVs.remove(variable)
    del model.named_vars[variable.name]
    model.named_vars_to_dims.pop(variable.name, None)
