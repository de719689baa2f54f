"""PyMC models whose likelihoods are computed by all ranks, and functions of their draws.

PyMC is imported at the first call rather than with this module, as it is an optional package.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from synkhronos.checks import check_integer
from synkhronos.extensions.pymc.posterior import compute_log_likelihood, sample_posterior_predictive
from synkhronos.ranks import count_available_cores

if TYPE_CHECKING:
    from synkhronos.extensions.pymc.data_parallel_model import DataParallelModel

__all__ = ["compute_log_likelihood", "data_parallel", "sample_posterior_predictive"]


def data_parallel(model: Any, ranks: str | None = None, chains: int | None = None) -> DataParallelModel:
    """Return a copy of a model whose log-density is computed by all ranks, each from its own rows.

    An observed variable is split if its log-density is a sum over rows, and each row's term depends on that row alone.
    A row consists of its observed values, and of its entries in ``pm.Data`` and in arrays of the model that are as
    long.  Parameters, priors and everything else stay in this process.  ``pm.sample``, ``pm.find_MAP`` and ``pm.fit``
    take the copy as they take the model.

    Parameters
    ----------
    model : pymc.Model or bambi.Model
        It is not changed.  A model of Bambi is built, if it is not yet; the copy is one of its PyMC model.
    ranks : "auto", optional
        Choose the number of ranks for each chain by measurement: time the chains' gradients with 1, 2, 4, ... ranks and
        use the fastest number.  If PyMC alone is as quick, no variable is split.  A line in PyMC's log has the times.
        Default: the ranks are divided among the chains.
    chains : int, optional
        Number of chains that will be sampled at a time; only with ``ranks="auto"``.  Default: PyMC's, one for each
        core and at most four.

    Returns
    -------
    pymc.Model
        It shares variables, coordinates and data with `model`: ``pm.set_data`` in one holds for both.  ``split_RVs`` is
        the list of observed variables and potentials that are split, and ``reasons`` a dict of the reasons why the
        others are not.

    Raises
    ------
    TypeError
        If `model` is not a model of PyMC, or another argument has a wrong type.
    ValueError
        If nothing can be split, with the reason for each observed variable; or if another argument is wrong.
    RuntimeError
        If ``ranks="auto"`` and no ranks are running.

    Warns
    -----
    UserWarning
        For each observed variable that can't be split, and for each such potential that is computed from arrays.  This
        process computes it.  The message has the reason.

    Notes
    -----
    Call `synkhronos.fork` before a sampler, which compiles the model.  ``pm.sample`` divides the ranks among the chains
    that it samples at a time; with ``cores=1`` each chain has all ranks.  PyMC's ``pm.sample_posterior_predictive`` and
    ``pm.compute_log_likelihood`` compute in this process alone; `sample_posterior_predictive` and
    `compute_log_likelihood` of this module compute in parallel.

    Use ``pm.set_data`` for new rows.  An evaluation notices a change in place only of an array of up to 32,768
    elements, or of most rows of a larger one.

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

    from synkhronos.extensions.pymc.data_parallel_model import DataParallelModel

    if type(model).__module__.partition(".")[0] == "bambi":
        if not model.built:
            model.build()
        model = model.backend.model
    if not isinstance(model, pm.Model):
        raise TypeError(f"model: expected a pymc.Model, got {model!r}")
    if ranks not in (None, "auto"):
        raise ValueError(f'ranks: expected "auto" or None, got {ranks!r}')
    if chains is not None and check_integer(chains, "chains") < 1:
        raise ValueError(f"chains: expected at least one, got {chains}")
    if chains is not None and ranks is None:
        raise ValueError(f'chains: expected ranks="auto" with it, got chains={chains} alone')
    parallel = DataParallelModel(model)
    if not parallel.split_RVs:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in parallel.reasons.items())
        raise ValueError(
            f"model: none of its variables can be split by rows: {reasons}"
            if reasons
            else "model: it has no observed variables, nor potentials that are computed from data"
        )
    for name, reason in parallel.reasons.items():
        warnings.warn(f"{name} is not split by rows, and is computed by this process alone: {reason}", stacklevel=2)
    if ranks == "auto":
        parallel.choose_ranks(model, chains or min(4, count_available_cores()))
    return parallel
