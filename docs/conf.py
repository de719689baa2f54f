"""Sphinx' settings: ``sphinx-build -W -b html docs docs/_build/html``."""

import re
import sys
from pathlib import Path

from sphinx.util.nodes import make_refnode

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

import synkhronos  # noqa: E402

project = "Synkhronos"
author = "Synkhronos contributors"
version = release = synkhronos.__version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "numpydoc",
    "damage",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["_build", "inventories"]
# `name` in a docstring is a name of the library, where there is such a name.
default_role = "py:obj"
# `fork` on a page means `synkhronos.fork`.
rst_prolog = ".. currentmodule:: synkhronos\n"
highlight_language = "python"
# A name that no object has is an error; but names in small letters may be parameters, which no page lists.
nitpicky = True
nitpick_ignore_regex = [("py:.*", "[a-z_0-9]+")]

autosummary_generate = False
autodoc_member_order = "bysource"
autodoc_typehints = "none"
maximum_signature_line_length = 90
numpydoc_show_class_members = False

# The inventories here name what the pages link to: the build needs no network. With one, it reads the projects' own.
intersphinx_mapping = {
    "numpy": ("https://numpy.org/doc/stable", (None, "inventories/numpy.txt")),
    "pytensor": ("https://pytensor.readthedocs.io/en/latest", (None, "inventories/pytensor.txt")),
    "pymc": ("https://www.pymc.io/projects/docs/en/stable", (None, "inventories/pymc.txt")),
}
intersphinx_timeout = 5

# The copy button leaves out prompts and output.
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

html_theme = "pydata_sphinx_theme"
html_title = "Synkhronos"
html_static_path = ["_static"]
html_css_files = ["synkhronos.css"]
html_theme_options = {
    "logo": {"text": "Synkhronos"},
    "header_links_before_dropdown": 8,
    "navbar_align": "left",
    "navigation_with_keys": False,
    # The page's sections are in the left sidebar: lines of code need the width.
    "secondary_sidebar_items": [],
    "footer_start": ["sphinx-version"],
    "footer_end": ["theme-version"],
}
html_sidebars = {
    "**": ["sidebar-nav-bs", "page-toc"],
    # These have no pages below or beside them.
    **dict.fromkeys(("api", "pymc"), ["page-toc"]),
    **dict.fromkeys(("index", "speed", "search", "genindex", "py-modindex"), []),
}
toc_object_entries_show_parents = "hide"
html_show_copyright = False
html_show_sourcelink = False


def resolve_short_name(app, env, node, contnode):
    """Resolve a name without its module, or with the module that defines it, such as `RankContext.lock`.

    Returns
    -------
    docutils.nodes.reference or None
        The link; None where no documented object has the name, several have it, or it may be a parameter's.
    """
    target = node.get("reftarget", "")
    if node.get("refdomain") != "py" or not re.search("[A-Z.]", target):
        return None
    domain = env.get_domain("py")
    names = [target]
    if target.startswith("synkhronos."):
        names.append(".".join(target.split(".")[-2:]))
    for name in names:
        objects = [item for item in domain.find_obj(env, None, None, name, None, 1) if not item[1].aliased]
        if len(objects) == 1:
            full, entry = objects[0]
            return make_refnode(app.builder, node["refdoc"], entry.docname, entry.node_id, contnode, full)
    return None


def setup(app):
    """Connect what Sphinx asks where a name is unknown."""
    app.connect("missing-reference", resolve_short_name)
