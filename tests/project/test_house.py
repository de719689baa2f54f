"""The rooms of the house: imports go down, never up.

A room is a folder, or a module, of ``synkhronos/``; docs/internals.rst says what each is for.
"""

import ast
import re
from pathlib import Path

import pytest

import synkhronos

PACKAGE = Path(synkhronos.__file__).resolve().parent
#: From the cellar up.  Rooms on one floor know nothing of each other.
FLOORS = [
    {"casts", "checks", "gpus", "ranks"},
    {"hosts"},
    {"devices"},
    {"lowering"},
    {"graphs"},
    {"compat", "data", "engines"},
    {"collectives", "function", "loading", "processes"},
    {"tasks", "tracing"},
    {"rules"},
    {"training"},
    {"extensions", "launch", "compat/platoon", "compat/theanompi"},
]
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
#: Rooms within a room: other libraries' names, on what is below the top floor.
INNER = {"compat/platoon", "compat/theanompi"}
#: The doors of the house see all rooms.
DOORS = {"__init__", "__main__"}
#: What starts programs of others, which may import ``theano``.
STARTERS = {"__main__", "launch", *INNER}


def room_of(path):
    return room_named(path.relative_to(PACKAGE).with_suffix("").parts)


def room_named(parts):
    inner = "/".join(parts[:2])
    return inner if inner in INNER else parts[0]


def imported_modules(path):
    """Yield what a file imports from the house, by module, or by module and name, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            package, _, rest = name.partition(".")
            if package == "synkhronos":
                yield rest


def imported(path):
    """Yield the rooms that a file imports from."""
    return (room_named(module.split(".")) for module in imported_modules(path))


FILES = sorted(PACKAGE.rglob("*.py"))
ROOMS = sorted({room_of(path) for path in FILES} - DOORS)


@pytest.mark.parametrize("room", ROOMS)
def test_imports_go_down(room):
    assert room in FLOOR, f"synkhronos/{room} stands on no floor: give it one here, and a line in docs/internals.rst"
    for path in FILES:
        if room_of(path) != room:
            continue
        for other in imported(path):
            if not other:
                # What users see: for rooms that are programs like theirs.
                assert FLOOR[room] > FLOOR["tasks"], f"{path} imports the package itself"
            elif other != room:
                assert FLOOR[other] < FLOOR[room], f"{path} imports {other}, which is not below {room}"


def module_of(path):
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


def test_no_modules_import_each_other():
    """Whenever they do, while a type checker reads them or when a function is called, too."""
    paths = {module_of(path): path for path in FILES if room_of(path) not in DOORS}
    imports = {module: set() for module in paths}
    for module, path in paths.items():
        for name in imported_modules(path):
            # ``from a.b import c`` imports the module a.b.c, or c from a.b.
            found = name if name in paths else name.rpartition(".")[0]
            if found in paths and found != module:
                imports[module].add(found)
    assert find_cycles(imports) == []


def test_cycles_are_found():
    assert find_cycles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a", "e"}, "e": {"d"}}) == [["b", "c"], ["d", "e"]]


def test_programs_that_use_theano_s_names_are_nobody_elses_business():
    for path in FILES:
        if room_of(path) not in {"compat", *STARTERS}:
            assert "compat" not in set(imported(path)), path


def test_theanos_names_need_three_modules_of_the_house():
    """As the head of ``compat`` says: it could be a distribution of its own."""
    files = [path for path in FILES if room_of(path) == "compat"]
    used = {module for path in files for module in imported_modules(path) if module.partition(".")[0] != "compat"}
    assert used == {"lowering.linker", "lowering.shapes", "lowering.sums"}


#: What knows the kinds of arrays: their devices, the engines of their functions, and PyTensor's translation to JAX.
KNOW_ARRAYS = {"devices", "engines", "lowering"}
#: Modules of devices for GPUs, and the names of these devices.
OF_GPUS = re.compile(r"devices\.(jax|pygpu|cuda|JAX|PYGPU)\b")


def test_no_other_room_knows_jax_or_pygpu():
    """So that a new device is one file: what others need to know, they ask the device of an array."""
    for path in FILES:
        room = room_of(path)
        if room in KNOW_ARRAYS:
            continue
        assert not [module for module in imported_modules(path) if OF_GPUS.match(module)], path
        if room not in {"compat", *INNER}:  # whose Ops tell PyTensor how to translate them
            for node in ast.walk(ast.parse(path.read_text())):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                assert not [name for name in names if re.match(r"(jax|jaxlib|pygpu|theano\.gpuarray)\b", name)], path


def test_the_map_of_the_source_is_complete_and_names_files_that_exist():
    page = (PACKAGE.parent / "docs" / "internals.rst").read_text()
    table = re.split("^Four ways", page, flags=re.MULTILINE)[0]
    assert [room for room in ROOMS if not re.search(rf"``{room}(/|\.py)``", table)] == []
    for package, files in re.findall(r"\* - ``(\w+)/``\n     - (.*?)(?=\n   \* -|\Z)", table, re.DOTALL):
        for name in re.findall("``(\\w+)``", files):
            assert (
                (PACKAGE / package / name).is_dir()
                or (PACKAGE / package / f"{name}.py").exists()
                or (PACKAGE / name).is_dir()
            ), f"docs/internals.rst: {package}/{name}"
    for path, room in re.findall("``((\\w+)/[a-z_/]+)(?:\\.py)?``", page):
        exists = (PACKAGE / path).is_dir() or (PACKAGE / f"{path}.py").exists()
        assert exists or room not in ROOMS, f"docs/internals.rst: {path}"
