"""Lint of names, docstrings and optional imports: findings may become fewer, but not more.

``python tests/support/lint_names.py`` compares the findings with the counts in lint_names.json, and fails if a rule has more
of them in all than before; moving code between files changes nothing.  With ``--update`` it writes lower counts into
lint_names.json.  Tests, benchmarks and demos are programs of their own: rules on public methods and on classes of one
name are for synkhronos/ alone.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
BASELINE = Path(__file__).with_suffix(".json")

VAGUE = re.compile(
    r"\b(?:Return|Yield|Say|Have|Do|Tell)s? (?:what|that|those|the same|so|such|who|how|which|where)\b|^(?:Has|Have)\b",
    re.ASCII,
)
#: First words of a docstring, or of a comment on a variable, that stand for a noun.
CLAUSE = re.compile(r"(?:(?:of|by|in|under|to|from|with) )?(?:what|which|how|whose)\b", re.ASCII | re.IGNORECASE)
#: First words of the description in a section of a docstring that stand for a noun.
CLAUSE_IN_SECTION = re.compile(rf"{CLAUSE.pattern}|(?:those|that|who|where)\b", re.ASCII | re.IGNORECASE)
#: First words of a description that `update_rule` inserts into a docstring, read apart from the other descriptions.
NO_NOUN = re.compile(rf"{CLAUSE_IN_SECTION.pattern}|(?:the same|as|no)\b", re.ASCII | re.IGNORECASE)
COMMENT = re.compile(r"^\s*#: (.*)", re.MULTILINE)
#: Prepositions and pronouns, which name nothing by themselves; `all` and `any` are methods of arrays.
BARE = frozenset(
    "as at both by each every everything for from in it its kept none of on one so some such that them they this those to "
    "what which who with".split()
)
#: Those that may name a variable: a number, and an argument of users.
BARE_VARIABLES = frozenset(("one", "every"))
#: First words of names that need a verb or a noun before them; a variable may be `by_rank` or `in_place`.
PREPOSITION, PREPOSITION_OF_VARIABLE = re.compile("_?(?:at|by|for|in|of)_"), re.compile("_?of_")
#: Phrases that have a plainer form, and this form.
CLUMSY = [
    (re.compile(phrase, re.ASCII), suggestion)
    for phrase, suggestion in [
        (r"\b[Aa]s of `", "as in `X`"),
        (r"\bone a rank\b", "one for each rank"),
        (r"\bin the place of\b", "in place of"),
        (r"(?<!')\b(?:class|process|loss|JAX|Linux)' ", "'s, as in the class's"),
        (r"\bsays? whether\b", "with ``is_x``"),
        (r"\b[Rr]eturn the gradients? by\b", "with respect to"),
        (r"\bgradients? of [^.]{1,60}? by (?:its|the|both)\b", "with respect to"),
        # Without a noun after it, such as "run", also across a line break in a docstring or comment.
        (
            r"\b[Aa] training\b(?![\s#]+(?:run|step|loop|function|job|set|graph|program|script|process|batch)\b)",
            "a training run",
        ),
        (r"\btrainings\b", "training runs"),
        (r"(?<!here )\b(?:is|are) no[\s#]+(?!longer|more|faster|slower|one\b)[a-z]+", "is not a, or are not"),
        (
            r"\b(?:un)?(?:initiali|synchroni|normali|optimi|summari|recogni|standardi)s(?:e|ing|ation)",
            "a z, as in NumPy",
        ),
    ]
]
SHORTEST = 3
#: The section of a docstring that lists parameters, which start in its first column.
PARAMETERS = re.compile(r"^Parameters\n-+\n(.*?)(?=^\w[\w ]*\n---|\Z)", re.DOTALL | re.MULTILINE)
LISTED = re.compile(r"^(\S.*?)(?: : |$)", re.MULTILINE)
#: The sections of a docstring that have a list of names or types with indented descriptions.
SECTIONS = re.compile(
    r"^(?:Parameters|Attributes|Returns|Yields|Raises)\n-+\n(.*?)(?=^\w[\w ]*\n---|\Z)", re.DOTALL | re.MULTILINE
)
#: The first line of each description.
DESCRIBED = re.compile(r"^\S.*\n[ ]+(\S.*)", re.MULTILINE)
#: A line that introduces a literal block, but no directive, and the text below it without the blank line between them.
UNSEPARATED_BLOCK = re.compile(r"^(?! *\.\. )(.*::)\n(?!\n)(?=.)", re.MULTILINE)
#: The head of a section.
SECTION_HEAD = re.compile(r"^\w[\w ]*\n---", re.MULTILINE)
#: The end of a sentence at a line's end, and a lower-case word at the same indent: words between them are missing.
LOWER_CASE_SENTENCE = re.compile(r"^([ ]*)\S.*[\w)`]\.\n\1([a-z]\w*\b.*)", re.MULTILINE)
PACKAGE = "synkhronos/"
#: Installed wherever mypy runs.
REQUIRED = {"numpy", "synkhronos"}
#: Modules whose classes have the names that other libraries give them.
FOREIGN = re.compile(r"synkhronos/(compat/theano/|theanompi/|platoon/(ops|param_sync|training/|channel/worker))")


class Finding(NamedTuple):
    """A place that breaks a rule."""

    rule: str
    path: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.text}"


def find_unlisted_imports(sources: Mapping[str, str], listed: Iterable[str]) -> Iterator[Finding]:
    """Yield imports that pyproject.toml does not list for mypy: its result would depend on the installed packages.

    Parameters
    ----------
    sources : mapping of str to str
        The source of each file by its path; they may import each other.
    listed : iterable of str
        Modules of mypy's overrides, such as ``"jax.*"``.
    """
    modules = {part for path in sources if not path.startswith(PACKAGE) for part in path.removesuffix(".py").split("/")}
    known = {*sys.stdlib_module_names, *REQUIRED, *modules, *(name.removesuffix(".*") for name in listed)}
    for path, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [str(node.module)]
            for name in names:
                if name.partition(".")[0] not in known:
                    yield Finding("import unlisted for mypy", path, node.lineno, name)


def find_unknown_parameters(function: ast.FunctionDef) -> Iterator[str]:
    """Yield the documented parameters that are none of the function's."""
    arguments = function.args
    if arguments.kwarg:
        return
    known = {argument.arg for argument in ast.walk(arguments) if isinstance(argument, ast.arg)}
    for section in PARAMETERS.findall(ast.get_docstring(function) or ""):
        for names in LISTED.findall(section):
            yield from (name for name in re.findall(r"\w+", names) if name.isidentifier() and name not in known)


def find_clauses_in_sections(docstring: str) -> Iterator[str]:
    """Yield the first lines of descriptions of parameters, attributes and results that are not noun phrases."""
    for section in SECTIONS.findall(docstring):
        yield from filter(CLAUSE_IN_SECTION.match, DESCRIBED.findall(section))


def find_damaged_lines(docstring: str) -> Iterator[tuple[str, str]]:
    """Yield the rule and text of lines where a blank line or words are missing, as after a merge."""
    for line in UNSEPARATED_BLOCK.findall(docstring):
        yield "no blank line after ::", line.strip()
    for _, line in LOWER_CASE_SENTENCE.findall(SECTION_HEAD.split(docstring)[0]):
        yield "sentence in lower case", line


def find_described_arguments(function: ast.FunctionDef) -> Iterator[tuple[int, str]]:
    """Yield the line and text of the descriptions that `update_rule` inserts into the docstring of a formula."""
    for decorator in function.decorator_list:
        if isinstance(decorator, ast.Call) and isinstance(decorator.func, ast.Name):
            if decorator.func.id == "update_rule":
                for keyword in decorator.keywords:
                    if isinstance(keyword.value, ast.Constant) and isinstance(keyword.value.value, str):
                        yield keyword.value.lineno, keyword.value.value


def find_documented_methods(sources: Iterable[str]) -> dict[str, set[str]]:
    """Return for each class, by its name, the methods that have a docstring in the class or in a base class."""
    nodes = [node for source in sources for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)]
    documented: dict[str, set[str]] = defaultdict(set)
    for node in nodes:
        documented[node.name] |= {m.name for m in node.body if isinstance(m, ast.FunctionDef) and ast.get_docstring(m)}
    for _ in range(4):  # at most as many classes derive from each other
        for node in nodes:
            for base in node.bases:
                documented[node.name] |= documented[re.sub(r"\[.*|.*\.", "", ast.unparse(base))]
    return documented


def check_names(sources: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the findings of names and docstrings.

    Parameters
    ----------
    sources : mapping of str to str
        The source of each file by its path.
    """
    classes: dict[str, list[tuple[str, int]]] = defaultdict(list)
    documented = find_documented_methods(source for path, source in sources.items() if path.startswith(PACKAGE))
    for path, source in sources.items():
        for comment in COMMENT.finditer(source):
            if CLAUSE.match(comment[1]):
                yield Finding("clause for a noun", path, source.count("\n", 0, comment.start(1)) + 1, comment[1])
        for pattern, suggestion in CLUMSY if path.startswith(PACKAGE) else ():
            for phrase in pattern.finditer(source):
                line = source.count("\n", 0, phrase.start()) + 1
                yield Finding("clumsy phrase", path, line, f"{phrase[0]!r}; better: {suggestion}")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                for vague in VAGUE.findall(ast.get_docstring(node) or ""):
                    yield Finding("vague docstring", path, getattr(node, "lineno", 1), vague)
                first = (ast.get_docstring(node) or "").partition("\n")[0]
                if CLAUSE.match(first) or first.startswith("The same"):
                    yield Finding("clause for a noun", path, getattr(node, "lineno", 1), first)
                for described in find_clauses_in_sections(ast.get_docstring(node) or ""):
                    yield Finding("clause for a noun", path, getattr(node, "lineno", 1), described)
                for rule, damaged in find_damaged_lines(ast.get_docstring(node) or ""):
                    yield Finding(rule, path, getattr(node, "lineno", 1), damaged)
            if isinstance(node, ast.FunctionDef):
                for line, described in find_described_arguments(node):
                    if NO_NOUN.match(described):
                        yield Finding("clause for a noun", path, line, described)
                for name in find_unknown_parameters(node):
                    yield Finding("unknown parameter documented", path, node.lineno, f"{node.name}: {name}")
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and (node.name in BARE or PREPOSITION.match(node.name)):
                yield Finding("bare name", path, node.lineno, node.name)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                if node.id in BARE - BARE_VARIABLES or PREPOSITION_OF_VARIABLE.match(node.id):
                    yield Finding("bare name", path, node.lineno, node.id)
            if not path.startswith(PACKAGE):
                continue
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                for method in node.body:
                    if isinstance(method, ast.FunctionDef) and not method.name.startswith("_"):
                        docstring = ast.get_docstring(method) or ""
                        is_inherited = not docstring and method.name in documented[node.name]
                        if len(docstring.split()) < SHORTEST and not is_inherited:
                            yield Finding("short docstring", path, method.lineno, f"{node.name}.{method.name}")
            if isinstance(node, ast.ClassDef) and not FOREIGN.match(path):
                classes[node.name.lstrip("_")].append((path, node.lineno))
    for name, places in classes.items():
        for path, line in places[1:]:
            yield Finding("class name in use", path, line, f"{name}, also in {places[0][0]}")


def read_sources(places: Iterable[str]) -> dict[str, str]:
    """Return the source of each Python file in these folders, and of these files, by its path."""
    files = {path for place in places for path in [ROOT / place, *(ROOT / place).rglob("*.py")] if path.is_file()}
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in sorted(files)}


def count_by_rule(findings: Iterable[Finding]) -> dict[str, dict[str, int]]:
    """Return the number of findings by rule and path."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for finding in findings:
        counts[finding.rule][finding.path] += 1
    return {rule: dict(sorted(counts[rule].items())) for rule in sorted(counts)}


def find_additions(findings: Iterable[Finding], baseline: Mapping[str, Mapping[str, int]]) -> list[Finding]:
    """Return the findings of rules that have more than before, in files that have more than before."""
    findings = list(findings)
    now = count_by_rule(findings)
    more = {rule for rule in now if sum(now[rule].values()) > sum(baseline.get(rule, {}).values())}
    return [
        finding
        for finding in findings
        if finding.rule in more
        and now[finding.rule][finding.path] > baseline.get(finding.rule, {}).get(finding.path, 0)
    ]


def find_missing_files(baseline: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Return the paths of these counts at which there is no file."""
    return sorted({path for counts in baseline.values() for path in counts if not (ROOT / path).is_file()})


def main(arguments: list[str]) -> int:
    """Print findings that are new, and return the exit status."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]
    checked = read_sources([*config["files"], *config["mypy_path"]])
    found = [
        *check_names({**read_sources(["synkhronos", "tests", "benchmarks", "demos", "docs"]), **checked}),
        *find_unlisted_imports(checked, [name for override in config["overrides"] for name in override["module"]]),
    ]
    baseline = json.loads(BASELINE.read_text())
    new = find_additions(found, baseline)
    for finding in new:
        print(finding)
    if new:
        print(f"more findings than {BASELINE.relative_to(ROOT)} has; the new ones are among these")
    elif "--update" in arguments:
        BASELINE.write_text(json.dumps(count_by_rule(found), indent=1) + "\n")
    elif missing := find_missing_files(baseline):
        print(f"{BASELINE.relative_to(ROOT)} lists files that do not exist; run with --update: {', '.join(missing)}")
        return 1
    return int(bool(new))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
