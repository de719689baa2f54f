"""Import of the user's class from ``modelfile`` and ``modelclass``.

The supervisor only parses the file, so that a wrong name is refused before any rank starts.  Ranks import it.
"""

from __future__ import annotations

import ast
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class ModelFileError(ValueError):
    """The model file does not exist, is no Python, or has no class of the name."""


def find(name: str, class_name: str, folders: Sequence[str]) -> tuple[str, str]:
    """Return the folder to put into `sys.path`, and the module's name, without an import.

    Parameters
    ----------
    name : str
        A path, ``models/mlp.py``, or a module, ``models.mlp``.
    class_name : str
        Has to be bound in the file.
    folders : list of str
        Searched for the file; for a module, before `sys.path`.

    Raises
    ------
    ModelFileError
        If the file does not exist, has a syntax error, or does not bind the class' name.
    """
    path, root = _find_file(name, folders)
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except SyntaxError as error:
        raise ModelFileError(f"modelfile: {path}, line {error.lineno}: {error.msg}") from None
    names = _find_names(tree)
    if class_name not in names and "*" not in names:
        classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
        raise ModelFileError(f"modelclass: {path} has no {class_name!r}: it has {', '.join(classes) or 'no class'}")
    parts = path.relative_to(root).with_suffix("").parts
    if any("." in part for part in parts[:-1]):  # the folder's name is no package's: import the file alone
        root, parts = path.parent, parts[-1:]
    if "." in parts[-1]:
        raise ModelFileError(f"modelfile: {path}: a module's name has no dot: rename the file")
    if parts[0] in sys.modules and parts[0] in {*sys.stdlib_module_names, "numpy", "synkhronos"}:
        raise ModelFileError(f"modelfile: {path}: {parts[0]!r} is a module that every run imports: rename the file")
    module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    return str(root), module


def _find_file(name: str, folders: Sequence[str]) -> tuple[Path, Path]:
    """Return the file, and the folder that its module's name is relative to."""
    if name.endswith(".py"):
        for folder in folders:
            path = Path(folder, name)
            if path.is_file():
                inside = not os.path.isabs(name) and ".." not in Path(name).parts
                return path.absolute(), Path(folder).absolute() if inside else path.absolute().parent
        raise ModelFileError(f"modelfile: there is no file {name} in {' or '.join(dict.fromkeys(folders))}")
    relative = name.replace(".", "/")
    for folder in [*folders, *sys.path]:
        for path in (Path(folder, f"{relative}.py"), Path(folder, relative, "__init__.py")):
            if path.is_file():
                return path.absolute(), Path(folder).absolute()
    raise ModelFileError(
        f"modelfile: expected a file or a module, got {name!r}: there is no {relative}.py in "
        f"{' or '.join(dict.fromkeys(folders))}, nor where Python looks for modules"
    )


def _find_names(tree: ast.Module) -> set[str]:
    """Return the names that a module binds outside of functions and classes, such as within ``if`` or ``try``."""
    names: set[str] = set()
    todo: list[ast.AST] = list(tree.body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(each.asname or each.name).split(".")[0] for each in node.names}
        else:
            names |= {node.id} if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else set()
            todo += ast.iter_child_nodes(node)
    return names


def load(root: str, module: str, class_name: str) -> Any:
    """Import the module, and return the class.

    Modules in the file's folder can be imported by their names, as those in a script's folder can.
    """
    if root not in sys.path:
        sys.path.insert(0, root)
    beside = str(Path(root, *module.split(".")[:-1]))
    if beside not in sys.path:
        sys.path.append(beside)
    found = getattr(importlib.import_module(module), class_name, None)
    if not isinstance(found, type):
        raise ModelFileError(f"modelclass: {class_name!r} of {module}: expected a class, got {found!r}")
    return found
