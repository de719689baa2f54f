"""Sphinx' settings: ``sphinx-build -W -b html docs docs/_build/html``."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

import synkhronos  # noqa: E402

project = "Synkhronos"
author = "Synkhronos contributors"
version = release = synkhronos.__version__

extensions = ["sphinx.ext.autodoc", "sphinx.ext.autosummary", "numpydoc", "damage"]
exclude_patterns = ["_build"]
# `name` in a docstring is a name of the library, where there is such a name.
default_role = "py:obj"
# `fork` on a page means `synkhronos.fork`.
rst_prolog = ".. currentmodule:: synkhronos\n"
highlight_language = "python"

autosummary_generate = False
autodoc_member_order = "bysource"
autodoc_typehints = "none"
numpydoc_show_class_members = False

html_theme = "alabaster"
html_theme_options = {
    "description": "PyTensor and Theano functions on all cores and GPUs",
    "fixed_sidebar": True,
    "page_width": "1080px",
}
html_show_copyright = False
