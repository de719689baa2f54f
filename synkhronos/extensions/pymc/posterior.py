"""Functions of a posterior's draws, computed by one process per rank.

PyMC computes the log-likelihood of each row, and predictions, draw after draw in one process, and keeps all results in
memory.  Here the draws are divided into blocks, which forked processes compute.  Results are written into shared
memory, or into a Zarr store, where they never are in memory as a whole.

.. code-block:: text

   master: PyMC computes the first draw, which compiles its function and gives shapes, dtypes and dimensions
     ├─▶ process 0: blocks 0, 2, 4, ... ─▶ shared memory or Zarr store
     └─▶ process 1: blocks 1, 3, 5, ... ─▶ the same arrays, other draws

Neither blocks nor their seeds depend on the number of processes, and so neither do the results.  PyMC and xarray are
imported at the first call, as they are optional packages.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from synkhronos import ranks
from synkhronos.extensions.chains import can_compute_in_forks, run_forked
from synkhronos.patching import replace_attribute

__all__ = ["compute_log_likelihood", "sample_posterior_predictive"]

#: Maximal number of bytes of the results of a block.
_BLOCK_NBYTES = 32 << 20
#: Minimal number of blocks per chain, if it has as many draws.
_MIN_BLOCKS = 16
#: Maximal number of elements of a chunk, per draw.
_CHUNK_SIZE = 1 << 17


def compute_log_likelihood(
    idata: Any,
    *,
    var_names: Sequence[str] | None = None,
    extend_inferencedata: bool = True,
    model: Any = None,
    progressbar: bool = True,
    compile_kwargs: dict[str, Any] | None = None,
    store: str | os.PathLike[str] | None = None,
) -> Any:
    """Compute the log-likelihood of each row for each draw, as `pymc.compute_log_likelihood` does, in parallel.

    As many processes as there are ranks on this machine compute PyMC's own function, each for its share of the draws.
    The numbers are PyMC's to the last bit.

    Parameters
    ----------
    idata : arviz.InferenceData or xarray.DataTree
        With a group ``posterior`` that has the dimensions ``chain`` and ``draw``.
    var_names : sequence of str, optional
        Names of observed variables.  Default: all.
    extend_inferencedata : bool, optional
        Add the group ``log_likelihood`` to `idata`, and return `idata`.
    model : pymc.Model, optional
        Default: the model of the context.
    progressbar : bool, optional
        Show a progress bar.
    compile_kwargs : dict, optional
        Arguments for the compilation, such as ``{"mode": "NUMBA"}``.
    store : path-like, optional
        Directory of a Zarr store, as ``idata.to_zarr`` writes it, to which the group ``log_likelihood`` is added.
        Each process writes its own draws into it.  Default: the result is kept in memory.

    Returns
    -------
    InferenceData, DataTree or xarray.Dataset
        `idata`, or the dataset of the group.  With `store`, the dataset reads from there when its values are used.

    Raises
    ------
    RuntimeError
        If no ranks are running.
    TypeError
        If `idata` has no group ``posterior``.
    ValueError
        If `store` has such a group already, or `idata` has other dimensions.
    WorkerError
        If a process exits.
    Exception
        Errors of PyMC and of the processes.  After an error, the group is removed from `store`.

    Notes
    -----
    Processes are forked, so that the model is not copied.  If the ranks are on GPUs, or if JAX compiles the function,
    this process computes alone.

    Examples
    --------
    >>> import numpy as np, pymc as pm, synkhronos as synk
    >>> n = synk.fork(2, use_gpu=False)
    >>> with pm.Model() as model:
    ...     center = pm.Normal("center")
    ...     _ = pm.Normal("y", center, observed=np.arange(5.0))
    ...     drawn = pm.sample(20, tune=20, chains=2, progressbar=False, compute_convergence_checks=False)
    ...     drawn = compute_log_likelihood(drawn, progressbar=False)
    >>> drawn.log_likelihood["y"].shape
    (2, 20, 5)
    >>> synk.close()
    """
    import pymc as pm
    from pymc.stats import log_density

    posterior = _get_posterior(idata, "idata")
    model = pm.modelcontext(model)
    calls = []

    def record(function: Any, dataset: Any, **kwargs: Any) -> Any:
        calls.append((function, dataset, kwargs))
        return apply(function, dataset, **kwargs)

    apply = log_density.apply_function_over_dataset
    first_draw = _replace_posterior(idata, posterior.isel(chain=[0], draw=[0]))
    with replace_attribute(log_density, "apply_function_over_dataset", record):
        template = pm.compute_log_likelihood(
            first_draw,
            var_names=var_names,
            extend_inferencedata=False,
            model=model,
            progressbar=False,
            compile_kwargs=dict(compile_kwargs or {}),
        )
    ((function, values, kwargs),) = calls
    values = posterior[list(values)].astype({name: array.dtype for name, array in values.items()})
    kwargs["progressbar"] = False

    def compute(block: _Block) -> Mapping[Any, Any]:
        result: Mapping[Any, Any] = apply(function, values.isel(**block.get_slices()), **kwargs)
        return result

    results = _compute_draws(
        "log_likelihood", template, posterior, compute, _count_processes(function.f), progressbar, store
    )
    return _add_group(idata, "log_likelihood", results) if extend_inferencedata else results


def sample_posterior_predictive(
    trace: Any,
    model: Any = None,
    var_names: Sequence[str] | None = None,
    *,
    random_seed: int | Sequence[int] | np.random.Generator | np.random.RandomState | None = None,
    progressbar: bool = True,
    extend_inferencedata: bool = False,
    predictions: bool = False,
    compile_kwargs: dict[str, Any] | None = None,
    store: str | os.PathLike[str] | None = None,
) -> Any:
    """Draw predictions for each draw of a posterior, as `pymc.sample_posterior_predictive` does, in parallel.

    The processes are chosen as in `compute_log_likelihood`.

    Parameters
    ----------
    trace : arviz.InferenceData or xarray.DataTree
        With a group ``posterior`` that has the dimensions ``chain`` and ``draw``.
    model : pymc.Model, optional
        Default: the model of the context.
    var_names : sequence of str, optional
        Names of variables to sample.  Default: the observed variables, and variables that depend on them.
    random_seed : int, sequence of int, numpy.random.Generator or RandomState, optional
        Seed, or a generator that draws one.  The draws do not depend on the number of ranks, but are other draws than
        PyMC's for this seed, from the same distribution.
    extend_inferencedata : bool, optional
        Add the group to `trace`, and return `trace`.
    predictions : bool, optional
        Name the group ``predictions`` rather than ``posterior_predictive``.
    progressbar, compile_kwargs, store
        As in `compute_log_likelihood`.

    Returns
    -------
    InferenceData or DataTree
        `trace`, or PyMC's result, which has the group and the groups of observed and constant data.  With `store`, the
        group reads from there when its values are used.

    Raises
    ------
    ValueError
        If nothing is to be sampled.
    Exception
        Further errors as in `compute_log_likelihood`.

    Notes
    -----
    The draws are divided into blocks, by their number and the size of the results.  Block ``i`` is sampled from element
    ``i`` of ``numpy.random.SeedSequence(random_seed).generate_state(number_of_blocks, "uint64")``.

    Examples
    --------
    >>> import numpy as np, pymc as pm, synkhronos as synk
    >>> n = synk.fork(2, use_gpu=False)
    >>> with pm.Model() as model:
    ...     center = pm.Normal("center")
    ...     _ = pm.Normal("y", center, observed=np.arange(5.0))
    ...     drawn = pm.sample(20, tune=20, chains=2, progressbar=False, compute_convergence_checks=False)
    ...     predicted = sample_posterior_predictive(drawn, random_seed=1, progressbar=False)
    >>> predicted.posterior_predictive["y"].shape
    (2, 20, 5)
    >>> synk.close()
    """
    import pymc as pm
    from pymc.pytensorf import reseed_rngs
    from pymc.sampling import forward

    posterior = _get_posterior(trace, "trace")
    group = "predictions" if predictions else "posterior_predictive"
    model = pm.modelcontext(model)
    if isinstance(random_seed, np.random.Generator | np.random.RandomState):
        random_seed = int.from_bytes(random_seed.bytes(16), "little")
    seeds = np.random.SeedSequence(random_seed)
    arguments = {"model": model, "var_names": var_names, "progressbar": False}
    compiled: list[Any] = []

    def record_compiled(*, outputs: list[Any], **kwargs: Any) -> Any:
        arguments["var_names"] = [variable.name for variable in outputs]
        compiled.append(original(outputs=outputs, **kwargs))
        return compiled[0]

    original = forward.compile_forward_sampling_function
    first_draw = _replace_posterior(trace, posterior.isel(chain=[0], draw=[0]))
    with (
        replace_attribute(forward, "compile_forward_sampling_function", record_compiled),
        replace_attribute(model, "observed_RVs", list(model.observed_RVs)),  # PyMC adds other variables to the list
    ):
        first_result = pm.sample_posterior_predictive(
            first_draw, predictions=predictions, random_seed=0, compile_kwargs=dict(compile_kwargs or {}), **arguments
        )
    template = getattr(first_result, group, None)
    if template is None or not compiled:
        raise ValueError("var_names: none of these variables is sampled")
    function = compiled[0][0]
    generators = [variable for variable in function.get_shared() if not hasattr(variable.type, "shape")]

    def compute(block: _Block) -> Mapping[Any, Any]:
        reseed_rngs(generators, block.seed)
        part = _replace_posterior(trace, posterior.isel(**block.get_slices()))
        with (
            replace_attribute(forward, "compile_forward_sampling_function", lambda *args, **kwargs: compiled[0]),
            replace_attribute(forward._log, "disabled", True),  # messages and warnings of the first draw are enough
            warnings.catch_warnings(action="ignore"),
        ):
            draws: Mapping[Any, Any] = pm.sample_posterior_predictive(part, return_inferencedata=False, **arguments)
        return draws

    results = _compute_draws(
        group, template, posterior, compute, _count_processes(function), progressbar, store, seeds=seeds
    )
    if extend_inferencedata:
        return _add_group(trace, group, results)
    if hasattr(first_result, "add_groups"):
        del first_result[group]
    return _add_group(first_result, group, results)


# -- the draws of a posterior, in ArviZ 0.23 and 1 ---------------------------------------------------------------


def _get_posterior(idata: Any, argument: str) -> Any:
    """Return the dataset of the posterior in an argument."""
    try:
        posterior = idata["posterior"]
    except (KeyError, TypeError):
        raise TypeError(
            f"{argument}: expected InferenceData or DataTree with a group 'posterior', got {type(idata).__name__}"
        ) from None
    posterior = posterior.to_dataset() if hasattr(posterior, "to_dataset") else posterior
    for dimension in ("chain", "draw"):
        if dimension not in posterior.sizes:
            raise ValueError(f"{argument}: the posterior has no dimension {dimension!r}, but {tuple(posterior.sizes)}")
    return posterior


def _replace_posterior(idata: Any, posterior: Any) -> Any:
    """Return inference data of this posterior, and of the data groups that PyMC compares with the model's."""
    names = idata.groups() if hasattr(idata, "add_groups") else idata.children
    groups = {name: idata[name] for name in ("constant_data", "observed_data") if name in names}
    groups["posterior"] = posterior
    return type(idata)(**groups) if hasattr(idata, "add_groups") else type(idata).from_dict(groups)


def _add_group(idata: Any, name: str, dataset: Any) -> Any:
    """Add a group to inference data, or replace it, and return the inference data."""
    if hasattr(idata, "add_groups"):
        idata.add_groups({name: dataset})
    else:
        idata[name] = dataset
    return idata


# -- blocks, and the processes that compute them -----------------------------------------------------------------


class _Block(NamedTuple):
    """A range of draws of one chain, and the seed of its predictions."""

    chain: int
    start: int
    stop: int
    seed: int

    def get_slices(self) -> dict[str, slice]:
        """Return the slices of the posterior's dimensions."""
        return {"chain": slice(self.chain, self.chain + 1), "draw": slice(self.start, self.stop)}


def _count_processes(function: Any) -> int:
    """Return the number of processes that may compute a compiled function, or 1 for this process alone."""
    from pytensor.link.jax.linker import JAXLinker

    session = ranks.get_session()
    is_xla = isinstance(function.maker.linker, JAXLinker)  # its threads do not outlive a fork
    return 1 if is_xla or not can_compute_in_forks(session) else len(session.rank.local_ranks)


def _compute_draws(
    group: str,
    template: Any,
    posterior: Any,
    compute: Callable[[_Block], Mapping[Any, Any]],
    n_processes: int,
    progressbar: bool,
    store: str | os.PathLike[str] | None,
    seeds: np.random.SeedSequence | None = None,
) -> Any:
    """Compute all draws.  Return a dataset with the variables of `template`, the result of the first draw."""
    import xarray

    template = template.to_dataset() if hasattr(template, "to_dataset") else template
    n_chains, n_draws = (posterior.sizes[name] for name in ("chain", "draw"))
    nbytes = sum(array.nbytes for array in template.values())
    block_length = max(1, min(_BLOCK_NBYTES // max(1, nbytes), math.ceil(n_draws / _MIN_BLOCKS)))
    ranges = [
        (chain, start, min(start + block_length, n_draws))
        for chain in range(n_chains)
        for start in range(0, n_draws, block_length)
    ]
    states = (seeds or np.random.SeedSequence(0)).generate_state(len(ranges), "uint64")
    blocks = [_Block(*block_range, int(seed)) for block_range, seed in zip(ranges, states, strict=True)]
    coords = {name: array for name, array in template.coords.items() if name not in ("chain", "draw")}
    coords.update({name: posterior[name] for name in ("chain", "draw")})
    empty_dataset = xarray.Dataset(coords=coords, attrs=template.attrs)
    shapes = {name: (n_chains, n_draws, *array.shape[2:]) for name, array in template.items()}
    if store is None:
        arrays = {name: _allocate_shared(shape, template[name].dtype) for name, shape in shapes.items()}
        _compute_blocks(compute, blocks, arrays, n_processes, progressbar)
        return empty_dataset.assign({name: (template[name].dims, array) for name, array in arrays.items()})
    with _create_group(store, group, empty_dataset) as zarr_group:
        arrays = {
            name: _create_array(
                zarr_group,
                name,
                array.dims,
                shape=shapes[name],
                dtype=array.dtype,
                chunks=_choose_chunk_shape(array.shape[2:], block_length),
            )
            for name, array in template.items()
        }
        _compute_blocks(compute, blocks, arrays, n_processes, progressbar)
    return xarray.open_zarr(store, group=group, consolidated=False, chunks=None)


def _allocate_shared(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return an array in memory that is shared with forked processes."""
    memory = mmap.mmap(-1, max(1, math.prod(shape) * dtype.itemsize))
    return np.frombuffer(memory, dtype, math.prod(shape)).reshape(shape)


def _choose_chunk_shape(shape: tuple[int, ...], block_length: int) -> tuple[int, ...]:
    """Return the shape of a chunk.  Only one process writes to a chunk.

    ``shape`` is that of one draw.
    """
    max_rows = max(1, _CHUNK_SIZE // max(1, math.prod(shape[1:])))
    return (1, block_length, *[min(max_rows, max(1, n_rows)) for n_rows in shape[:1]], *[max(1, n) for n in shape[1:]])


@contextlib.contextmanager
def _create_group(store: str | os.PathLike[str], group: str, empty_dataset: Any) -> Iterator[Any]:
    """Create a Zarr group of a dataset without variables, and yield it.  After an error, remove it."""
    import zarr

    path = Path(store)
    root = zarr.open_group(path, mode="a", use_consolidated=False)
    if group in root:
        raise ValueError(f"store: {path} has a group {group!r} already")
    try:
        empty_dataset.to_zarr(path, group=group, mode="w", consolidated=False, zarr_format=root.metadata.zarr_format)
        yield root[group]
        is_consolidated = zarr.open_group(path, mode="r").metadata.consolidated_metadata is not None
        if is_consolidated:  # readers would not find a group that it lacks
            zarr.consolidate_metadata(path)
    except BaseException:
        if group in root:
            del root[group]
        raise


def _create_array(group: Any, name: str, dims: Sequence[str], **kwargs: Any) -> Any:
    """Return a new array of a Zarr group, with the names of its dimensions where xarray reads them."""
    if group.metadata.zarr_format == 3:
        return group.create_array(name=name, dimension_names=dims, **kwargs)
    # xarray takes a fill value of this format for missing values.
    return group.create_array(name=name, attributes={"_ARRAY_DIMENSIONS": list(dims)}, fill_value=None, **kwargs)


def _compute_blocks(
    compute: Callable[[_Block], Mapping[Any, Any]],
    blocks: Sequence[_Block],
    arrays: Mapping[Any, Any],
    n_processes: int,
    progressbar: bool,
) -> None:
    """Compute all blocks, and write the results into the arrays."""
    from pymc.progress_bar import create_simple_progress

    def compute_share(process_index: int) -> Generator[int, None, None]:
        for block in blocks[process_index::n_processes]:
            results = compute(block)
            for name, array in arrays.items():
                array[block.chain, block.start : block.stop] = np.asarray(results[name])[0]
            yield block.stop - block.start

    progress = create_simple_progress(progressbar=progressbar)
    with progress:
        task = progress.add_task("Computing ...", completed=0, total=sum(block.stop - block.start for block in blocks))
        shares = compute_share(0) if n_processes == 1 else run_forked(compute_share, n_processes)
        with contextlib.closing(shares) as counts:
            for count in counts:
                progress.advance(task, count)
