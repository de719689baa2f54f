"""`synkhronos.Function`, and how users make one and send it to the ranks."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from synkhronos import ranks
from synkhronos.data_objects import Data, data
from synkhronos.data_objects.rows import BatchArgument
from synkhronos.devices import find_device, get_rank_device
from synkhronos.functions.arguments import build_computation, is_single_output
from synkhronos.functions.computation import DEFAULT_VARIANT, Computation
from synkhronos.functions.dispatcher import Dispatcher, distribute_scheduled, schedule_distribution
from synkhronos.graph_libraries.library import call_set_value_callbacks
from synkhronos.replication.replicator import register_shareds
from synkhronos.variable_types import SharedVariable


class Function:
    """A function that runs on all ranks at once, made by `synkhronos.function`; see `__call__`.

    Two functions that share a variable share its value on each rank.  A copy has the same shared variables.  A deep
    copy, or an unpickled function, has copies of them with their values in the master.
    """

    def __init__(self, computation: Computation, is_single_output: bool):
        self._computation = computation
        self._is_single_output = is_single_output
        self._dispatcher = Dispatcher(computation)

    # -- attributes ------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """Name of the function in messages."""
        return self._computation.name

    @property
    def output_modes(self) -> list[str | None]:
        """Reduction op of each output as it was given, None for the master's own value.

        The name is that of Synkhronos 1.0.
        """
        return list(self._computation.given_output_ops)

    @property
    def update_modes(self) -> list[str | None]:
        """Op of each update as it was given; `num_slices` accumulates new values with it.

        The name is that of Synkhronos 1.0.
        """
        return list(self._computation.given_update_ops)

    def __repr__(self) -> str:
        names = ", ".join(spec.name or "_" for spec in self._computation.inputs)
        return f"<synkhronos.Function {self.name}({names}) -> {self.output_modes}>"

    def get_shared(self) -> list[SharedVariable]:
        """Return the shared variables that the function reads or updates."""
        return self._computation.list_shareds()

    @property
    def maker(self) -> Any:
        """The maker of the graph library's plain function, with its compiled graph, ``maker.fgraph``."""
        return self._plain_function.maker

    def dprint(self, **kwargs: Any) -> Any:
        """Print the compiled graph, as the graph library's ``debugprint`` does with these arguments."""
        return self._computation.library.package.printing.debugprint(self._plain_function, **kwargs)

    @property
    def _plain_function(self) -> Any:
        return self._computation.get_or_compile(DEFAULT_VARIANT).function

    if not TYPE_CHECKING:  # mypy would accept any attribute

        def __getattr__(self, name):
            raise AttributeError(
                f"synkhronos.Function has no attribute {name!r}, which a function of the graph library may have: "
                "synkhronos.function() makes another function, and copy.copy() one with the same shared variables",
                name=name,
                obj=self,
            )

    # -- copies ----------------------------------------------------------------------------------------------

    def __copy__(self) -> Function:
        return _make_function(copy.copy(self._computation), self._is_single_output)

    def __reduce__(self) -> Any:
        # The nodes are in topological order, so that pickle does not recurse as deep as the graph.
        computation = self._computation
        return _unpickle_function, (
            computation.library.sort_nodes(computation.list_variables()),
            computation,
            self._is_single_output,
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Function:
        computation = self._computation
        rebuild, arguments = self.__reduce__()
        for shared in self.get_shared():
            # PyTensor's containers can pickle arrays of devices, but not copy them.
            if (
                find_device(computation.library.borrow_value(shared)).must_move_shared_values
                and id(shared.container) not in memo
            ):
                memo[id(shared.container)] = pickle.loads(pickle.dumps(shared.container))
        copied: Function = rebuild(*copy.deepcopy(arguments, memo))
        return copied

    # -- calls -----------------------------------------------------------------------------------------------

    def __call__(
        self,
        *inputs: Any,
        batch: BatchArgument = None,
        batch_s: Any = None,
        num_slices: int = 1,
        output_subset: Sequence[int] | None = None,
        **named_inputs: Any,
    ) -> Any:
        """Run on all ranks and return the reduced outputs.

        Parameters
        ----------
        *inputs : Data or array_like
            In the order of ``inputs`` and then ``bcast_inputs``.  Arrays other than Data are copied into shared memory,
            which the next call overwrites.
        batch : int, slice, list of int, or array of int or bool, optional
            Rows of the scattered inputs to use: a number of rows from the first, a slice, indexes, or a mask.  They are
            selected before they are divided among the ranks.  Default: all rows.
        batch_s : slice or list of int, or a list of these with one for each rank, optional
            Rows of its own ``sliceable_shareds`` that each rank uses.  Default: all rows.
        num_slices : int
            Number of slices in which each rank computes its rows; more slices take less memory.
        output_subset : sequence of int, optional
            Indexes of the outputs to compute and return.  Default: all outputs.
        **named_inputs
            Inputs by the names of their variables.

        Returns
        -------
        ndarray, or list of ndarray
            A list if the argument ``outputs`` of `synkhronos.function` was one.  In JAX mode, `Result` objects instead
            of arrays: the call returns before the ranks have computed, and a `Result` waits for its array when used.

        Raises
        ------
        TypeError, ValueError, IndexError
            For wrong arguments, before any rank starts.
        WorkerError
            If a worker raised an exception, or died.

        Notes
        -----
        The selected rows are divided into contiguous shares, in rank order and as evenly as possible.  A rank without
        rows updates nothing, and contributes to no reduction.

        Examples
        --------
        >>> import numpy as np, pytensor.tensor as pt, synkhronos as synk
        >>> n = synk.fork(2, use_gpu=False)
        >>> x = pt.dvector("x")
        >>> f = synk.function([x], [(x.sum(), "sum"), (x * 2, "gather")])
        >>> total, doubled = f(np.arange(5.0))
        >>> float(total), doubled.tolist()
        (10.0, [0.0, 2.0, 4.0, 6.0, 8.0])
        >>> f(np.arange(5.0), batch=[4, 0], output_subset=[1])
        [array([8., 0.])]
        >>> synk.close()
        """
        session = ranks.get_session()
        with session.call_lock:
            session.wait_until_idle()
            dispatcher = self._dispatcher
            call = dispatcher.build_call(session, inputs, named_inputs, batch, batch_s, num_slices, output_subset)
            outputs = dispatcher.finish_call(session, call, session.run(call))
            return outputs[0] if self._is_single_output and outputs else outputs

    def as_theano(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph library's plain function in the master alone, on all rows.

        Parameters
        ----------
        *args, **kwargs
            Data objects or arrays, as for the plain function.

        Returns
        -------
        ndarray, or list of ndarray
            Nothing is scattered or reduced.  Updates change the master's shared variables only.  The next call that
            reads one of them on all ranks warns.
        """
        plain = [np.asarray(arg) if isinstance(arg, Data) else arg for arg in args]
        named = {key: np.asarray(arg) if isinstance(arg, Data) else arg for key, arg in kwargs.items()}
        result = self._plain_function(*plain, **named)
        for shared, _ in self._computation.updates + self._computation.default_updates:
            call_set_value_callbacks(shared)  # the function may have overwritten the old value's array
        if isinstance(result, list | tuple):
            return result[0] if self._is_single_output else list(result)
        return [] if result is None else result if self._is_single_output else [result]

    def build_inputs(
        self,
        *args: npt.ArrayLike,
        force_cast: bool = False,
        oversize: float = 1.0,
        minibatch: bool | Sequence[bool] = False,
        **named: npt.ArrayLike,
    ) -> Data | list[Data]:
        """Create Data objects for the function's inputs.

        Parameters
        ----------
        *args : array_like
            A value for each input, in order.
        force_cast, oversize
            As in `synkhronos.data`.
        minibatch : bool or sequence of bool
            A flag for all inputs, or one for each; see `Data.minibatch`.
        **named : array_like
            Values by the names of inputs.

        Returns
        -------
        Data, or list of Data
            One for each input, in order.  A single Data object if the function has one input.

        Examples
        --------
        >>> import numpy as np, pytensor.tensor as pt, synkhronos as synk
        >>> n = synk.fork(2, use_gpu=False)
        >>> f = synk.function([pt.fmatrix("x")])
        >>> f.build_inputs(np.ones((4, 2)), force_cast=True)
        <synkhronos.Data 'x': float32, shape (4, 2)>
        >>> synk.close()
        """
        ranks.get_session()
        values = self._dispatcher.input_writer.match_arguments(args, named)
        specs = self._computation.inputs
        if isinstance(minibatch, list | tuple):
            if len(minibatch) != len(specs):
                raise ValueError(f"minibatch: expected one flag for each of {len(specs)} inputs, got {minibatch!r}")
            flags = list(minibatch)
        else:
            flags = [minibatch] * len(specs)
        arrays = [
            data(value, var=spec.variable, minibatch=flag, force_cast=force_cast, oversize=oversize, name=spec.name)
            for value, spec, flag in zip(values, specs, flags, strict=True)
        ]
        return arrays[0] if len(arrays) == 1 else arrays


def function(
    inputs: Sequence[Any],
    outputs: Any = None,
    bcast_inputs: Sequence[Any] | None = None,
    updates: Any = None,
    givens: Any = None,
    sliceable_shareds: Sequence[Any] | None = None,
    **kwargs: Any,
) -> Function:
    """Create a function that runs on all ranks at once, in place of ``pytensor.function`` or ``theano.function``.

    Parameters
    ----------
    inputs : list of variables
        Inputs whose rows are divided among the ranks, along axis 0.
    outputs : variable, (variable, op), or a list of these, optional
        Each output is reduced over ranks by its op, one of :ref:`ops`: "avg" (the default: ranks have equal weights),
        "mean" (the weight of a rank is its number of rows), "sum" and others, or None (the master's own value).
    bcast_inputs : list of variables, optional
        Inputs of which every rank reads all rows.
    updates : dict, or list of (shared, expression) or (shared, expression, op), optional
        Each rank updates its own copy.  With ``num_slices`` the values of the slices are reduced by the op.
    givens : dict or list of pairs, optional
        Substitutions in the graph.
    sliceable_shareds : list of shared variables, optional
        Shared variables whose rows (along axis 0) ``batch_s`` selects and ``num_slices`` divides.
    **kwargs
        Other arguments of the graph library's ``function``: ``mode``, ``name``, ``on_unused_input``, ...

    Returns
    -------
    Function
        Each rank compiles it in the first call.

    Raises
    ------
    RuntimeError
        Before `fork`, and after `close`.
    TypeError, ValueError
        For wrong arguments, such as the op "avg" or "mean" for an integer output.

    Examples
    --------
    >>> import numpy as np, pytensor, pytensor.tensor as pt, synkhronos as synk
    >>> n = synk.fork(2, use_gpu=False)
    >>> x, w = pt.dmatrix("x"), pytensor.shared(np.ones(3), "w")
    >>> f = synk.function([x], ((x * w).sum(), "sum"), updates=[(w, w + x.sum(axis=0))])
    >>> float(f(np.ones((4, 3))))
    12.0
    >>> synk.gather(w).tolist()
    [[3.0, 3.0, 3.0], [3.0, 3.0, 3.0]]
    >>> synk.close()
    """
    session = ranks.get_session()
    device = get_rank_device(session.rank)
    computation = build_computation(inputs, outputs, bcast_inputs, updates, givens, sliceable_shareds, kwargs, device)
    return _make_function(computation, is_single_output(outputs))


def _make_function(computation: Computation, is_single_output: bool) -> Function:
    """Return a new function, and register it for `distribute`."""
    function = Function(computation, is_single_output)
    register_shareds(computation.list_shareds())
    schedule_distribution(function._dispatcher)
    return function


def get_dispatcher(function: Function) -> Dispatcher:
    """Return the dispatcher of a function, for commands of other packages that contain a call of it."""
    return function._dispatcher


def _unpickle_function(nodes: Sequence[Any], computation: Computation, is_single_output: bool) -> Function:
    return _make_function(computation, is_single_output)


def distribute() -> None:
    """Send every function, and each shared variable once, to all ranks.

    Each call sends the functions that were created since the last call, with their new shared variables.  A function
    that was not distributed is sent at its first call.

    Notes
    -----
    The workers' copies of a shared variable get the master's present value.  From then on each rank has its own copy.
    Random generators are moved apart, so that each rank draws different numbers.  The master draws the same
    numbers as a serial program.

    Examples
    --------
    >>> import numpy as np, pytensor, synkhronos as synk
    >>> n = synk.fork(2, use_gpu=False)
    >>> s = pytensor.shared(np.zeros(2), "s")
    >>> f = synk.function([], [], updates=[(s, s + 1)])
    >>> synk.distribute()
    >>> s.set_value(np.ones(2))  # in the master alone
    >>> synk.gather(s).tolist()
    [[1.0, 1.0], [0.0, 0.0]]
    >>> synk.close()
    """
    session = ranks.get_session()
    with session.call_lock:
        session.wait_until_idle()
        distribute_scheduled(session)
