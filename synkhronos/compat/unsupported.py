"""The message for modules and names of Theano that are not provided on PyTensor."""

from __future__ import annotations


def explain_unsupported(name: str) -> str:
    """Return the message for a module or name of Theano that `synkhronos.compat` does not provide.

    Examples
    --------
    >>> explain_unsupported("theano.gpuarray").split(";")[0]
    'theano.gpuarray is not provided by synkhronos.compat on PyTensor'
    """
    return (
        f"{name} is not provided by synkhronos.compat on PyTensor; the page docs/from_theano.rst, "
        '"From Theano", lists the names that are'
    )
