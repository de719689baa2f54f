"""Layers of the package: a module imports only from lower layers.

A package is a folder, or a module, of ``synkhronos/``; docs/source_map.rst has the map.
"""

import ast
import builtins
import functools
import io
import re
import tokenize
from pathlib import Path

import pytest

import synkhronos

PACKAGE = Path(synkhronos.__file__).resolve().parent
DOCS = PACKAGE.parent / "docs"
#: Layers, the lowest first.  Packages of one layer do not import each other.
LAYERS = [
    {"casts", "checks", "containers", "gpus", "patching", "variable_types"},
    {"ranks"},
    {"devices", "hosts"},
    {"lowering"},
    {"graph_libraries"},
    {"replication"},
    {"compat", "data_objects", "engines"},
    {"collectives", "functions", "loading", "startup"},
    {"programs", "timelines"},
    {"exchange_rules"},
    {"training"},
    {"extensions", "launcher", "platoon"},
    {"theanompi"},
]
LAYER = {package: number for number, packages in enumerate(LAYERS) for package in packages}
#: Modules that may import all packages.
ENTRY_POINTS = {"__init__", "__main__"}
#: Packages that run programs which may import ``theano``.
STARTERS = {"__main__", "launcher", "platoon"}


def get_package_name(path):
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


@functools.cache
def parse(path):
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text())


@functools.cache
def list_imported_modules(path):
    """Return the names that a file imports from the package, in functions too: ``module`` or ``module.name``."""
    names = []
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return [module for top, _, module in (name.partition(".") for name in names) if top == "synkhronos"]


def list_imported_packages(path):
    """Yield the packages that a file imports from."""
    return (module.partition(".")[0] for module in list_imported_modules(path))


FILES = sorted(PACKAGE.rglob("*.py"))
PACKAGES = sorted({get_package_name(path) for path in FILES} - ENTRY_POINTS)


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_go_to_lower_layers(package):
    assert package in LAYER, f"synkhronos/{package} has no layer: give it one here, and a row in docs/source_map.rst"
    for path in FILES:
        if get_package_name(path) != package:
            continue
        for other in list_imported_packages(path):
            assert other, f"{path} imports the whole package: import from the package that defines the name"
            if other != package:
                assert LAYER[other] < LAYER[package], f"{path} imports {other}, which is not below {package}"


#: Folders and modules of some packages, the lowest first.
INNER_LAYERS = {
    "training": "schedules updates train_function monitoring checkpoints loops trainer",
    "launcher": "core_binding configuration model_class supervision rank_process train check_model doctor "
    "background_run tmlauncher",
    "platoon": "util configparser param_sync channel training ops worker_process launcher",
}


@pytest.mark.parametrize("package", INNER_LAYERS)
def test_imports_within_a_package_go_to_lower_layers(package):
    layers, prefix = INNER_LAYERS[package].split(), f"{package}."
    files = [path for path in FILES if path.is_relative_to(PACKAGE / package)]
    parts = {path: path.relative_to(PACKAGE / package).with_suffix("").parts[0] for path in files}
    assert set(parts.values()) - {"__init__"} == set(layers)
    for path, part in parts.items():
        if part != "__init__":
            modules = [name.removeprefix(prefix) for name in list_imported_modules(path) if name.startswith(prefix)]
            higher = {module.split(".")[0] for module in modules} & set(layers[layers.index(part) + 1 :])
            assert not higher, f"{path} imports {higher}"


#: Modules of the package that a file imports by a string, which `list_imported_modules` does not see.
IMPORTED_BY_STRING = {
    ("__main__.py", "synkhronos."),  # an entry point: it imports the module of the subcommand alone
    ("compat/import_hooks.py", "synkhronos."),  # its finder gets the name of a module of platoon
}


def list_strings_imported(tree):
    """Return the strings, or the constant starts of f-strings, that a file passes to `importlib.import_module`."""
    strings = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            argument = node.args[0]
            if isinstance(argument, ast.JoinedStr):
                argument = argument.values[0]
            if isinstance(argument, ast.Constant):
                strings.append(argument.value)
    return strings


def test_few_files_import_the_package_by_a_string():
    found = {(str(path.relative_to(PACKAGE)), name) for path in FILES for name in list_strings_imported(parse(path))}
    assert {(path, name) for path, name in found if name.startswith("synkhronos")} == IMPORTED_BY_STRING


def test_list_strings_imported_lists_them():
    source = "import_module('a.b')\nimportlib.import_module(f'a.{name}')\nimport_module(name)\nopen('a')"
    assert list_strings_imported(ast.parse(source)) == ["a.b", "a."]


def is_private(name):
    return name.startswith("_") and not name.endswith("__")


def list_private_names(tree):
    """Yield the private names that a module defines: its own, and those of its classes and their instances."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
            yield node.attr


def is_self(node):
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def find_private_uses(trees):
    """Return the uses of private names that only another package defines.

    A class may use those of its base class.

    Parameters
    ----------
    trees : list of (package, place, tree)
    """
    defined = {}
    for package, _, tree in trees:
        defined.setdefault(package, set()).update(filter(is_private, list_private_names(tree)))
    everywhere = set().union(*defined.values())
    uses = []
    for package, place, tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and not is_self(node.value):
                names = [node.attr]
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("synkhronos."):
                names = [alias.name for alias in node.names]
            else:
                continue
            foreign = everywhere - defined[package]
            uses += [f"{place}:{node.lineno}: {name}" for name in names if is_private(name) and name in foreign]
    return uses


def test_packages_use_no_private_names_of_others():
    trees = [(get_package_name(path), path.relative_to(PACKAGE), parse(path)) for path in FILES]
    assert find_private_uses(trees) == []


def test_find_private_uses_finds_them():
    first = "class A:\n    def _f(self):\n        self._x = 1\n        other._x = 2"
    second = "from synkhronos.a import _g\n\ndef f(a):\n    return a._f() + a._x + a._replace()"
    third = "class B(A):\n    def f(self):\n        return self._f()"
    trees = [("a", "a.py", ast.parse(f"{first}\n\ndef _g():\n    pass")), ("b", "b.py", ast.parse(second))]
    trees += [("c", "c.py", ast.parse(third))]
    assert sorted(find_private_uses(trees)) == ["b.py:1: _g", "b.py:4: _f", "b.py:4: _x"]


def get_module_name(path):
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def find_cycles(imports):
    """Return the modules that import each other, directly or not, as lists."""
    cycles = []
    done = set()
    for start in imports:
        reached, stack = set(), [start]
        while stack:
            for other in imports[stack.pop()] - reached:
                reached.add(other)
                stack.append(other)
        if start in reached:
            cycles.append((start, reached))
    groups = []
    for start, reached in cycles:
        if start not in done:
            groups.append(sorted(other for other, back in cycles if other in reached and start in back))
            done.update(groups[-1])
    return groups


def test_imports_have_no_cycle():
    """Imports within functions and those for type checkers count, and those of entry points."""
    paths = {get_module_name(path): path for path in FILES}
    imports = {module: set() for module in paths}
    for module, path in paths.items():
        for name in list_imported_modules(path):
            # ``from a.b import c`` imports the module a.b.c, or c from a.b.
            imported = name if name in paths else name.rpartition(".")[0]
            if imported in paths and imported != module:
                imports[module].add(imported)
    assert find_cycles(imports) == []


def test_find_cycles_finds_them():
    assert find_cycles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a", "e"}, "e": {"d"}}) == [["b", "c"], ["d", "e"]]


def find_unprepared_calls(tree):
    """Yield the lines of ``with session.call_lock`` blocks that don't begin with ``session.wait_until_idle()``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.With) and ast.unparse(node.items[0]).endswith((".call_lock", ".nested_call_lock")):
            session = ast.unparse(node.items[0]).rpartition(".")[0]
            if ast.unparse(node.body[0]) != f"{session}.wait_until_idle()":
                yield node.lineno


def test_every_call_begins_with_wait_until_idle():
    for path in FILES:
        assert list(find_unprepared_calls(parse(path))) == [], path


def test_find_unprepared_calls_finds_them():
    source = "with a.call_lock:\n  a.wait_until_idle()\nwith a.b.call_lock:\n  a.wait_until_idle()\nwith a.lock:\n  f()"
    assert list(find_unprepared_calls(ast.parse(source))) == [3]


#: Public functions named like the module that defines them.
HOMONYMS = {"functions.function", "programs.run", "timelines.timeline", "training.updates.master_weights"}


def list_hidden_modules(package):
    """Yield the modules that ``import package.module as m`` can't reach: its ``__init__`` imports a like-named object."""
    modules = {path.stem for path in package.glob("*.py")} | {
        path.parent.name for path in package.glob("*/__init__.py")
    }
    prefix = ".".join(["synkhronos", *package.relative_to(PACKAGE).parts])
    for node in parse(package / "__init__.py").body:
        if isinstance(node, ast.ImportFrom) and node.module != prefix:
            for alias in node.names:
                if (alias.asname or alias.name) in modules:
                    yield f"{prefix}.{alias.asname or alias.name}".removeprefix("synkhronos.")


def test_no_function_hides_its_module():
    packages = {path.parent for path in FILES if path.stem == "__init__" and "theano" not in path.parts}
    assert {name for package in packages for name in list_hidden_modules(package)} == HOMONYMS


def test_only_entry_points_import_compat():
    for path in FILES:
        if get_package_name(path) not in {"compat", *STARTERS}:
            assert "compat" not in set(list_imported_packages(path)), path


def test_compat_imports_four_modules_of_other_packages():
    """Then it could become a separate distribution, as its docstring says."""
    files = [path for path in FILES if get_package_name(path) == "compat"]
    used = {module for path in files for module in list_imported_modules(path) if module.partition(".")[0] != "compat"}
    ops = {"lowering.numpy_op.NumpyOp", "lowering.numpy_op.register_lowering"}
    assert used == {"lowering.linker", "lowering.bounded_canonizer", "lowering.random_keys", *ops}


#: Packages that may import JAX and pygpu.
ARRAY_PACKAGES = {"devices", "engines", "graph_libraries", "lowering"}
#: Modules and names of devices for GPUs.
GPU_DEVICES = re.compile(r"devices\.(jax|jax_device|pygpu_device|cuda|JAX|PYGPU)\b")


def test_only_array_packages_import_jax_or_pygpu():
    """Then a new device is one file: other packages call methods of an array's device."""
    for path in FILES:
        package = get_package_name(path)
        if package in ARRAY_PACKAGES:
            continue
        assert not [module for module in list_imported_modules(path) if GPU_DEVICES.match(module)], path
        if package not in {"compat", "extensions", "platoon"}:  # their Ops tell PyTensor how to translate them to JAX
            for node in ast.walk(parse(path)):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                assert not [name for name in names if re.match(r"(jax|jaxlib|pygpu|theano\.gpuarray)\b", name)], path


def list_files(package):
    """Return the files of a package, without those of its subpackages, as paths without suffix."""
    paths = [path for path in (PACKAGE / package).rglob("*.py") if get_package_name(path) == package]
    return {str(path.relative_to(PACKAGE / package).with_suffix("")) for path in paths if path.stem != "__init__"}


def is_module(path):
    """Whether a path without suffix is a folder or a Python file."""
    return path.is_dir() or path.with_suffix(".py").exists()


def find_unnamed(files, names):
    """Return the files whose path, and every folder above it, is missing from the names."""
    return sorted(file for file in files if not {file, *map(str, Path(file).parents)} & set(names))


def test_source_map_names_every_file():
    page = (DOCS / "source_map.rst").read_text()
    rows = re.findall(r"\* - (\d+)\n +- ``([\w/]+?)(?:/|\.py)``\n +- (.*?)(?=\n   \* -|\s*\Z)", page, re.DOTALL)
    assert sorted(PACKAGES) == sorted(package for _, package, _ in rows)
    assert [int(layer) - 1 for layer, *_ in rows] == sorted(LAYER[package] for _, package, _ in rows)
    unnamed = {}
    for layer, package, text in rows:
        assert int(layer) - 1 == LAYER[package], package
        names = re.findall(r"``([\w/]+)``", text)
        for name in names:
            assert is_module(PACKAGE / package / name) or is_module(PACKAGE / name), f"{package}: {name}"
        unnamed[package] = find_unnamed(list_files(package), names)
    assert {package: files for package, files in unnamed.items() if files} == {}


@pytest.mark.parametrize("name", ["internals", "source_map"])
def test_pages_on_the_source_name_existing_files(name):
    paths = re.findall(r"``((\w+)/[a-z_/]+)(?:\.py)?``", (DOCS / f"{name}.rst").read_text())
    unknown = [path for path, package in paths if package in PACKAGES and not is_module(PACKAGE / path)]
    assert paths and unknown == []


def test_find_unnamed_finds_files():
    assert find_unnamed({"a", "b", "c/d", "c/e", "f/g"}, ["a", "c/d", "f"]) == ["b", "c/e"]


@functools.cache
def list_defined_names(path):
    """Return the names that a file defines: functions, classes, and ``Class.method``; in C++, functions."""
    if path.suffix == ".cc":
        return set(re.findall(r"^[\w:]+ (\w+)\(", path.read_text(), re.MULTILINE))
    names = set()
    for node in parse(path).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{member.name}" for member in node.body if isinstance(member, ast.FunctionDef)}
    return names


def find_missing_names(text):
    """Return the missing files that a line of a walk names, and the functions that its files do not define."""
    literals = re.findall("``(.+?)``", text)
    paths = [PACKAGE / literal for literal in literals if literal.endswith((".py", ".cc"))]
    missing = [str(path.relative_to(PACKAGE)) for path in paths if not path.exists()]
    defined = set().union(*(list_defined_names(path) for path in paths if path.exists()))
    names = [literal for literal in literals if re.fullmatch(r"\w+(\.(?!(?:py|cc)$)\w+)?", literal)]
    return missing + [name for name in names if name not in defined]


def test_source_walks_name_existing_functions():
    page = (DOCS / "internals.rst").read_text()
    walks = re.split("^Four walks|^Mechanisms and invariants$", page, flags=re.MULTILINE)[1]
    lines = re.findall(r"^#\. (.*(?:\n   .*)*)", walks, re.MULTILINE)
    assert len(lines) > 40
    assert {line: missing for line in lines if (missing := find_missing_names(line))} == {}


@pytest.mark.parametrize(("page", "min_names"), [("internals", 40), ("glossary", 5)])
def test_pages_name_existing_classes_and_methods(page, min_names):
    defined = set().union(*map(list_defined_names, [*FILES, *PACKAGE.rglob("*.cc")])) | set(dir(builtins))
    text = (DOCS / f"{page}.rst").read_text()
    names = set(re.findall(r"``(?:[a-z_/]+\.)?([A-Z]\w*[a-z]\w*(?:\.\w+)?)(?:\(\))?``", text))
    assert len(names) > min_names and sorted(names - defined) == []


def test_find_missing_names_finds_them():
    assert find_missing_names("``casts.py``: ``check_cast`` of ``f(x)``, ``lost``") == ["lost"]
    assert find_missing_names("``ranks/lost.py``: ``Rank.barrier`` of ``ranks/rank.py``") == ["ranks/lost.py"]
    assert find_missing_names("``ranks/rank.py``: ``Rank.lost``, ``fail``") == ["Rank.lost", "fail"]
    assert find_missing_names("``devices/jax/nccl_ffi.cc``: ``Start``, ``Lost``") == ["Lost"]


def split_source(path):
    """Return the words of a file's code, with strings and path, and its docstrings and comments as one text."""
    source = path.read_text()
    nodes = [
        node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
    ]
    docstrings = {node.body[0].value.lineno for node in nodes if ast.get_docstring(node) is not None}
    code, prose = [*path.with_suffix("").parts], []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        is_docstring = token.type == tokenize.STRING and token.start[0] in docstrings
        (prose if is_docstring or token.type == tokenize.COMMENT else code).append(token.string)
    return set(re.findall(r"\w+", " ".join(code))), "\n".join(prose)


def find_unknown_names(prose, words):
    """Return the names in single backticks that have a part which is not a word of the code."""
    names = re.findall(r"(?<![`:\w])`([A-Za-z_][\w.]*)`(?!`)", prose)
    return {name for name in names if not set(name.split(".")) <= words}


def test_docstrings_and_pages_name_existing_things():
    sources = [split_source(path) for path in FILES]
    words = set().union(*(code for code, _ in sources))
    found = set().union(*(find_unknown_names(prose, words) for _, prose in sources))
    assert found == {"jax.vmap", "weakref.WeakKeyDictionary"}
    for page in ("extending", "glossary"):
        text = (DOCS / f"{page}.rst").read_text().replace("``", "`")
        unknown = find_unknown_names(text, words)
        assert {name for name in unknown if not name.endswith(".py")} == set()  # files of tests, too


def test_find_unknown_names_finds_them():
    assert find_unknown_names("`a` of `a.b`, ``c``, `f(x)`, `_c`, `a.c`", {"a", "b"}) == {"_c", "a.c"}
