"""Theano's API on PyTensor: ``import theano`` on machines without Theano.

    >>> import synkhronos.compat  # the script's first line

Where Theano 1.0.5 is installed, ``import theano`` imports it; this package then patches it (`theano_patches`) and
provides old modules that scripts for Theano import.  Where it is not installed, an import hook (`import_hooks`)
provides ``theano``, ``theano.tensor``, ... from modules that are built on PyTensor.  The environment variable
``SYNKHRONOS_THEANO`` selects one of the two: ``theano`` or ``pytensor``.

The package could be a separate distribution.  Its interface with the rest of Synkhronos:

- It imports ``linker``, ``numpy_op``, ``random_keys`` and ``bounded_canonizer`` of ``synkhronos.lowering``, which
  translate PyTensor's functions to JAX.
- Only the modules that start users' scripts (``__main__``, ``launcher``, ``platoon``) import it, and workers that are
  new processes: the master's `sys.meta_path` has its finders.
- Other packages read four attributes.  ``theano.__served_on__`` marks a module that is not Theano itself.
  ``In.default_list`` is a list of one with an input's default value.  An Op's ``is_product`` and ``is_single_kernel``
  tell ``lowering.precision`` which results may be computed in bfloat16.

``import platoon`` imports ``synkhronos.platoon``, unless Platoon is installed.
"""

from __future__ import annotations

import importlib.util
import os
import sys

from synkhronos.compat import import_hooks, theano_patches

__all__ = ["install", "library"]

#: Environment variable that selects the library.
LIBRARY_VARIABLE = "SYNKHRONOS_THEANO"


def install() -> str:
    """Make ``import theano`` work, with Theano itself or with PyTensor in its place.

    Importing `synkhronos.compat` calls this.  Calling it again changes nothing.

    Returns
    -------
    str
        ``"theano"`` or ``"pytensor"``: the library behind ``import theano``.

    Raises
    ------
    ValueError
        If ``SYNKHRONOS_THEANO`` names neither.
    ImportError
        If PyTensor is selected, but Theano has been imported.

    Examples
    --------
    >>> install()
    'pytensor'
    """
    import_hooks.install_hook(import_hooks.find_shim, is_last=True)
    import_hooks.install_hook(import_hooks.find_platoon)
    import_hooks.install_hook(import_hooks.find_theanompi)
    if import_hooks.is_hook_installed(import_hooks.find_theano):
        return "pytensor"
    selected = os.environ.get(LIBRARY_VARIABLE, "")
    if selected not in ("", "theano", "pytensor"):
        raise ValueError(f"{LIBRARY_VARIABLE} has to be 'theano' or 'pytensor', not {selected!r}")
    if selected == "theano" or (selected == "" and _is_theano_available()):
        theano_patches.patch_theano()
        return "theano"
    if "theano" in sys.modules:
        raise ImportError(
            f"{LIBRARY_VARIABLE}=pytensor, but Theano is imported already: import synkhronos.compat before theano, "
            "or start the script with `python -m synkhronos script.py`"
        )
    import_hooks.install_hook(import_hooks.find_theano)
    return "pytensor"


def _is_theano_available() -> bool:
    """Whether Theano itself is imported or installed."""
    if "theano" in sys.modules:
        return True
    spec = importlib.util.find_spec("theano")
    return spec is not None and spec.origin is not None  # a folder of this name has no origin


#: The library behind ``import theano``: ``"theano"`` or ``"pytensor"``.
library = install()
