"""Location of the user's model class: its file is found and parsed without being imported."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from symtable import symtable

from synkhronos.launcher.configuration.settings import SettingsError


def locate_model_class(path_or_module: str, class_name: str, folders: Sequence[str]) -> tuple[str, str]:
    """Find the file of the model class without importing it.  Return a folder for `sys.path`, and the module's name.

    The class's file is a path such as ``models/mlp.py`` or a module such as ``models.mlp``, searched in ``folders`` and
    then, for a module, in `sys.path`.  Raise SettingsError if it does not exist or does not define the class.
    """
    path, folder = _find_file(path_or_module, folders)
    source = path.read_bytes()
    try:
        tree = ast.parse(source, str(path))
        table = symtable(source, str(path), "exec")  # type: ignore[arg-type] # bytes have their encoding
    except SyntaxError as error:
        raise SettingsError(f"modelfile: {path}, line {error.lineno}: {error.msg}") from None
    is_bound = any(s.get_name() == class_name and (s.is_assigned() or s.is_imported()) for s in table.get_symbols())
    has_star = any(alias.name == "*" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) for alias in n.names)
    if not is_bound and not has_star:
        classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
        raise SettingsError(f"modelclass: {path} has no {class_name!r}: it has {', '.join(classes) or 'no class'}")
    name_parts = path.relative_to(folder).with_suffix("").parts
    if any("." in part for part in name_parts[:-1]):
        # A folder with a dot in its name can't be a package: import the file alone.
        folder, name_parts = path.parent, name_parts[-1:]
    if "." in name_parts[-1]:
        raise SettingsError(f"modelfile: {path}: a module's name can't contain a dot: rename the file")
    if name_parts[0] in sys.modules and name_parts[0] in {*sys.stdlib_module_names, "numpy", "synkhronos"}:
        raise SettingsError(f"modelfile: {path}: {name_parts[0]!r} is a module that every run imports: rename the file")
    module = ".".join(name_parts[:-1] if name_parts[-1] == "__init__" else name_parts)
    return str(folder), module


def _find_file(path_or_module: str, folders: Sequence[str]) -> tuple[Path, Path]:
    """Find the file, and the folder to which the module's name is relative."""
    if path_or_module.endswith(".py"):
        for folder in folders:
            path = Path(folder, path_or_module)
            if path.is_file():
                is_inside = not os.path.isabs(path_or_module) and ".." not in Path(path_or_module).parts
                return path.absolute(), Path(folder).absolute() if is_inside else path.absolute().parent
        raise SettingsError(f"modelfile: there is no file {path_or_module} in {' or '.join(dict.fromkeys(folders))}")
    relative = path_or_module.replace(".", "/")
    for folder in [*folders, *sys.path]:
        for path in (Path(folder, f"{relative}.py"), Path(folder, relative, "__init__.py")):
            if path.is_file():
                return path.absolute(), Path(folder).absolute()
    raise SettingsError(
        f"modelfile: expected a file or a module, got {path_or_module!r}: there is no {relative}.py in "
        f"{' or '.join(dict.fromkeys(folders))}, nor where Python looks for modules"
    )
