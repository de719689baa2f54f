"""The module ``theano.scan_module.scan_utils``, on PyTensor."""

from typing import Any

from pytensor.graph.basic import equal_computations
from pytensor.graph.replace import clone_replace
from pytensor.scan.utils import expand_empty, until


def clone(
    output: Any, replace: Any = None, strict: bool = True, share_inputs: bool = True, copy_inputs: Any = None
) -> Any:
    """Copy a graph with replaced variables.

    Parameters
    ----------
    output : variable or list of variables
    replace : dict or list of pairs, optional
        Replacement of each variable.
    strict : bool
        Whether replacements have to have the same type.
    share_inputs : bool
        Whether the copy has the same shared variables and inputs; ``copy_inputs`` is its old name.

    Examples
    --------
    >>> x, y = T.dscalars("x", "y")
    >>> theano.clone(x * 2, {x: y}).eval({y: 3.0})
    array(6.)
    """
    if copy_inputs is not None:
        share_inputs = copy_inputs
    return clone_replace(output, replace, rebuild_strict=strict, copy_inputs_over=share_inputs)
