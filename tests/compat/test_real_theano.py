"""Patches of the installed Theano: its BLAS flags, the modules that it lacks, and programs in its default mode."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from system import run_code

import synkhronos.compat
from synkhronos.compat import import_hooks, theano_patches

ROOT = Path(__file__).resolve().parents[2]


def install_and_get_flags(monkeypatch, theano_flags, finds_blas=False, theanorc="", blas="-lopenblas"):
    """Return THEANO_FLAGS as `theano_patches.patch_theano` leaves them."""
    if theano_flags is None:
        monkeypatch.delenv("THEANO_FLAGS", raising=False)
    else:
        monkeypatch.setenv("THEANO_FLAGS", theano_flags)
    monkeypatch.setenv("THEANORC", theanorc)
    monkeypatch.delitem(sys.modules, "theano", raising=False)
    monkeypatch.setattr(theano_patches, "_can_theano_find_blas", lambda: finds_blas)
    monkeypatch.setattr(theano_patches, "find_blas_flags", lambda: blas)
    theano_patches.patch_theano()
    return os.environ.get("THEANO_FLAGS")


@pytest.mark.parametrize(
    "given, expected",
    [
        (None, "blas.ldflags=-lopenblas"),
        ("", "blas.ldflags=-lopenblas"),
        ("floatX=float32", "floatX=float32,blas.ldflags=-lopenblas"),
        ("blas.ldflags=", "blas.ldflags="),
        ("floatX=float32, blas.ldflags=-lblas", "floatX=float32, blas.ldflags=-lblas"),
    ],
)
def test_blas_flag_is_set_if_missing(monkeypatch, given, expected):
    assert install_and_get_flags(monkeypatch, given) == expected


def test_blas_flag_is_not_set_if_theano_finds_a_library(monkeypatch):
    assert install_and_get_flags(monkeypatch, None, finds_blas=True) is None


def test_blas_flag_of_theanorc_is_kept(monkeypatch, tmp_path):
    file = tmp_path / "theanorc"
    file.write_text("[blas]\nldflags = -lmine\n")
    assert install_and_get_flags(monkeypatch, None, theanorc=f"/nowhere:{file}") is None
    file.write_text("[global]\nfloatX = float32\n")
    assert install_and_get_flags(monkeypatch, None, theanorc=str(file)) == "blas.ldflags=-lopenblas"
    file.write_text("what is this")
    assert install_and_get_flags(monkeypatch, None, theanorc=str(file), blas="") == "blas.ldflags="


@pytest.mark.parametrize("printed, blas", [("/usr/lib/libopenblas.so", "-lopenblas"), ("libopenblas.so", "")])
def test_find_blas_flags_names_a_library_that_the_compiler_finds(monkeypatch, printed, blas):
    done = subprocess.CompletedProcess([], 0, stdout=f"{printed}\n")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: done)
    assert theano_patches.find_blas_flags() == blas


def test_find_blas_flags_is_empty_without_a_compiler(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert theano_patches.find_blas_flags() == ""


def test_shims_are_found_last_and_once():
    import_hooks.install_hook(import_hooks.find_shim, is_last=True)
    assert [getattr(finder, "hook", None) for finder in sys.meta_path].count(import_hooks.find_shim) == 1
    assert import_hooks.find_shim("theano.tensor.signal.other", None) is None
    assert import_hooks.find_shim("pkg_resources", None).origin.endswith("shims/pkg_resources.py")


def test_pkg_resources_shim_finds_versions():
    from synkhronos.compat.shims import pkg_resources

    assert pkg_resources.get_distribution("pytest").version == pytest.__version__
    with pytest.raises(pkg_resources.DistributionNotFound):
        pkg_resources.get_distribution("no such package")


def run(code):
    """Run a program with Theano's default flags; return the last line that it prints."""
    # The folder of compiled modules is kept, since it changes no result.
    flags = [flag for flag in os.environ.get("THEANO_FLAGS", "").split(",") if flag.startswith("base_compiledir")]
    return run_code(code, timeout=200, cwd=ROOT, THEANO_FLAGS=",".join(flags)).splitlines()[-1]


needs_theano = pytest.mark.skipif(synkhronos.compat.library != "theano", reason="Theano is not installed")


@needs_theano
def test_scan_runs_in_theanos_default_mode():
    code = """
    import synkhronos.compat
    import theano, theano.tensor as T
    x = T.vector()
    sums, _ = theano.scan(lambda step, total: total + step, sequences=x, outputs_info=T.zeros(()))
    print(theano.function([x], sums)([1, 2, 3]).tolist())
    """
    assert run(code) == "[1.0, 3.0, 6.0]"


@needs_theano
def test_downsample_module_of_lasagne_works_on_theano():
    code = """
    import synkhronos.compat
    import numpy as np, theano, theano.tensor as T
    from theano.tensor.signal import downsample
    x = T.tensor4()
    y = downsample.max_pool_2d(x, (2, 2), ignore_border=True, st=(1, 1), padding=(1, 1), mode="sum")
    mode = theano.Mode(linker="c|py", optimizer="fast_compile")
    print(theano.function([x], y, mode=mode)(np.ones((1, 1, 2, 2), theano.config.floatX))[0, 0].tolist())
    """
    assert run(code) == "[[1.0, 2.0, 1.0], [2.0, 4.0, 2.0], [1.0, 2.0, 1.0]]"
