"""The module ``theano.scan_module.scan_utils``, on PyTensor."""

from typing import Any

from pytensor.graph.basic import equal_computations
from pytensor.graph.replace import clone_replace
from pytensor.scan.utils import expand_empty, until


def clone(
    output: Any, replace: Any = None, strict: bool = True, share_inputs: bool = True, copy_inputs: Any = None
) -> Any:
    """Copy a graph with replaced variables.  ``copy_inputs`` is the old name of ``share_inputs``."""
    if copy_inputs is not None:
        share_inputs = copy_inputs
    return clone_replace(output, replace, rebuild_strict=strict, copy_inputs_over=share_inputs)
