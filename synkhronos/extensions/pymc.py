"""PyMC models whose likelihoods are computed by all ranks.

`data_parallel`
    A model in which the ranks compute what the observed rows contribute.

PyMC is imported when it is called, not before.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pymc

    from synkhronos.extensions.pymc_model import DataParallelModel

__all__ = ["data_parallel"]


def data_parallel(model: pymc.Model) -> DataParallelModel:
    """Return the same model, with a log-density that all ranks compute, each from its own rows.

    An observed variable is split if its log-density is a sum over rows, and each row's depends on that row alone: of
    the observed values, of ``pm.Data``, and of arrays in the model that are as long.  Parameters, priors and all else
    stay in this process.  What is returned is used as the model is: ``pm.sample``, ``pm.find_MAP`` and ``pm.fit`` run
    as before, and whenever they ask for the density or its gradient, all ranks compute.

    Parameters
    ----------
    model : pymc.Model
        It stays as it is, and goes on computing in this process alone.

    Returns
    -------
    pymc.Model
        It has the same variables, coordinates and data: ``pm.set_data`` in one holds for both.  Beside what every model
        has there are ``split_RVs``, the observed variables and potentials that are split, and ``reasons``, a dict that
        says why the others are not.

    Raises
    ------
    TypeError
        If `model` is no model.
    ValueError
        If nothing can be split; the message says why, for each observed variable.

    Warns
    -----
    UserWarning
        For each observed variable, and each potential that is computed from arrays, that stays in this process because
        it can't be split; it says why.

    Notes
    -----
    Call `synkhronos.fork` before the model is compiled, as samplers do, and pass ``cores=1`` to ``pm.sample``: chains
    run one after another, each on all ranks.  What is no density of the whole model is computed by this process:
    ``pm.sample_posterior_predictive``, ``pm.compute_log_likelihood``.

    Use ``pm.set_data`` for new rows.  If an array is changed in place, an evaluation notices it only if the array has
    up to 32,768 elements, or most of its rows were changed.

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

    from synkhronos.extensions.pymc_model import DataParallelModel

    if not isinstance(model, pm.Model):
        raise TypeError(f"model: expected a pymc.Model, got {model!r}")
    made = DataParallelModel(model)
    if not made.split_RVs:
        each = "; ".join(f"{name}: {reason}" for name, reason in made.reasons.items())
        raise ValueError(
            f"model: none of its variables can be split by rows: {each}"
            if each
            else "model: it has no observed variables, nor potentials that are computed from data"
        )
    for name, reason in made.reasons.items():
        warnings.warn(f"{name} is not split by rows, and is computed by this process alone: {reason}", stacklevel=2)
    return made
