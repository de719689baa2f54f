"""What does Theano 1.0.5 need to be told beside NumPy 1.23 and Python 3.11?

`install`
    Names a BLAS when the user named none and Theano would fail to find one; has loops run by Theano's own Python code.
`usable_blas`
    The one that is named.
"""

from __future__ import annotations

import configparser
import os
import subprocess
import sys
import warnings


def install() -> None:
    """Name a BLAS in THEANO_FLAGS, if need be, which Theano reads as it is imported; say that scans have no C."""
    # Theano's C code around a scan's steps was made by a Cython that knew no Python 3.11, and does not compile.  Where
    # its module can't be imported, Theano has Python code in its place.
    sys.modules["theano.scan_module.scan_perform_ext"] = None  # type: ignore[assignment]
    if "theano" not in sys.modules and not _blas_is_named() and not _theano_finds_blas():
        flags = os.environ.get("THEANO_FLAGS", "")
        os.environ["THEANO_FLAGS"] = f"{flags},blas.ldflags={usable_blas()}".lstrip(",")


def usable_blas() -> str:
    """Return the linker's flags for a BLAS that this machine can link: OpenBLAS, or none.

    Without one Theano computes products of matrices by NumPy's.

    Examples
    --------
    >>> usable_blas() in ("-lopenblas", "")
    True
    """
    try:
        # GCC prints the whole path of a library that it would link, and the bare name of one that it doesn't find.
        found = subprocess.run(
            ["g++", "-print-file-name=libopenblas.so"], capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
    return "-lopenblas" if os.path.isabs(found) else ""


def _blas_is_named() -> bool:
    """Whether THEANO_FLAGS or a .theanorc file sets blas.ldflags; they are read as Theano reads them."""
    flags = os.environ.get("THEANO_FLAGS", "").split(",")
    if any(flag.split("=")[0].strip() == "blas.ldflags" for flag in flags):
        return True
    files = [os.path.expanduser(name) for name in os.environ.get("THEANORC", "~/.theanorc").split(os.pathsep)]
    parser = configparser.RawConfigParser()
    try:
        parser.read(files)
    except configparser.Error:
        return False  # Theano itself will say what is wrong with the file
    return parser.has_option("blas", "ldflags")


def _theano_finds_blas() -> bool:
    """Whether Theano's own search works, which reads what NumPy was built with."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            import numpy.distutils.__config__ as built  # type: ignore[import-not-found, unused-ignore]
        except ImportError:
            return False
    return hasattr(built, "blas_opt_info")
