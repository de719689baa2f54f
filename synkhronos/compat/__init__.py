"""Which library answers to ``import theano``?

    >>> import synkhronos.compat  # the program's first line

Where Theano 1.0.5 is installed, Theano does, and this only names a BLAS for it (`real`) and gives back a module that
Lasagne 0.1 misses (`gaps`).  Where it is not, PyTensor does: the modules ``theano``, ``theano.tensor``, ... are served
from `tree`, by an import hook (`hook`).  The environment variable ``SYNKHRONOS_THEANO`` asks for one of the two:
``theano`` or ``pytensor``.

What this room and the others know of each other, so that it could be a distribution of its own:

- It imports ``synkhronos.lowering.linker``, ``shapes`` and ``sums``: how PyTensor's functions become JAX'.
- The modules that start programs of others (``__main__``, ``launch``, ``platoon``) import it, and no other one.
- Others read four attributes: ``theano.__served_on__`` says that a module of that name is not Theano, ``In.default``
  is the value of an input that is not passed, in a list, and an Op's ``multiplies`` and ``elementwise`` tell
  ``lowering.precision`` what may be computed in bfloat16.

``import platoon`` finds `platoon`, unless Platoon is installed.  It is a room of its own, on the top floor, since it
starts ranks; nothing else here imports it.

`install`
    What importing this module does; returns the library that was chosen.
`chosen`
    The library that answers to ``import theano``, as chosen when this module was imported.
"""

from __future__ import annotations

import importlib.util
import os
import sys

from synkhronos.compat import copies, gaps, hook, real

__all__ = ["chosen", "install"]

#: The environment variable that asks for one of the two.
VARIABLE = "SYNKHRONOS_THEANO"


def install() -> str:
    """Make ``import theano`` work, with Theano itself or with PyTensor in its place.

    Importing `synkhronos.compat` calls this.  Calling it again changes nothing.

    Returns
    -------
    str
        ``"theano"`` or ``"pytensor"``: which of them answers.

    Raises
    ------
    ValueError
        If ``SYNKHRONOS_THEANO`` names neither.
    ImportError
        If PyTensor is to answer, and Theano is imported already.

    Examples
    --------
    >>> install()
    'pytensor'
    """
    gaps.install()
    hook.serve_alias("platoon")
    copies.install()
    if hook.is_installed():
        return "pytensor"
    asked = os.environ.get(VARIABLE, "")
    if asked not in ("", "theano", "pytensor"):
        raise ValueError(f"{VARIABLE} has to be 'theano' or 'pytensor', not {asked!r}")
    if asked == "theano" or (asked == "" and _theano_is_here()):
        real.install()
        return "theano"
    if "theano" in sys.modules:
        raise ImportError(
            f"{VARIABLE}=pytensor, but Theano is imported already: import synkhronos.compat before theano, "
            "or start the program with `python -m synkhronos script.py`"
        )
    hook.install()
    return "pytensor"


def _theano_is_here() -> bool:
    if "theano" in sys.modules:
        return True
    spec = importlib.util.find_spec("theano")
    return spec is not None and spec.origin is not None  # else a mere folder of that name


chosen = install()
