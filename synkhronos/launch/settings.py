"""Settings of a run, from the command line, the environment and a session file, in this order of precedence.

All settings are checked before any rank starts.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import json
import math
import os
import re
import sys
import time
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from synkhronos import rules
from synkhronos.checks import check_at_least, is_number
from synkhronos.gpus import get_n_gpu
from synkhronos.hosts import MAX_RANKS_PER_HOST, Host, parse_hosts, read_mpi_rank_and_size
from synkhronos.launch import key_value
from synkhronos.launch.model import check_model_options
from synkhronos.ranks import count_available_cores
from synkhronos.training.checkpoints.checkpoint import list_checkpoints
from synkhronos.training.monitoring.early_stopping import parse_monitored_metric

#: Prefix of environment variables that are settings.
PREFIX = "SYNKHRONOS_"
#: Files in a run's folder: the settings, the first failure, and the process IDs of the ranks.
SETTINGS, FAILURE, PROCESSES = "settings.json", "failure.txt", "processes.json"
_TRUE, _FALSE = {"true", "yes", "on", "1"}, {"false", "no", "off", "0"}
#: Exchange rules by their names in lower case.
RULES: dict[str, type[rules.Rule]] = {
    name.lower(): kind
    for name, kind in vars(rules).items()
    if isinstance(kind, type) and issubclass(kind, rules.Rule) and kind is not rules.Rule
}
#: Entries of a model class's config that the run sets, and a hint for the error if the user sets them.
_RUN_CONFIG = {
    "rank": "each rank has its own",
    "size": "set the number of ranks by 'ranks'",
    "verbose": "it is true on rank 0",
    "seed": "use the setting 'seed'",
    "mname": "it is the class's name",
}
#: Metrics of an epoch: the mean training cost, and the metrics of `ModelRecorder.val_error`.
_METRICS = ("loss", "cost", "error", "top5")
#: Files of results.  A run may use a folder that has settings but none of these.
_RESULTS = ("rank-*.jsonl", "reports.jsonl", "params.npz", "checkpoints")


class SettingsError(ValueError):
    """A setting is wrong; the message begins with its name."""


@dataclass(frozen=True)
class Settings:
    """Checked settings of a run, made by `resolve`."""

    #: Name under which Python imports the module, and name of the model class in it.
    modelfile: str
    modelclass: str
    #: First folder in which Python searches the module.
    root: str
    #: Device of each rank of this machine: ``"cpu"``, or ``"cuda0"`` and so on.
    devices: tuple[str, ...]
    #: Names of the machines with ranks, this one first, with optional numbers of ranks: ``"b:3"``.  Empty for one
    #: machine.
    hosts: tuple[str, ...] = ()
    rule: str = "BSP"
    rule_options: dict[str, Any] = field(default_factory=dict)
    #: The run's folder.
    folder: str = ""
    #: Number of epochs; None: ``n_epochs`` of the model.
    epochs: int | None = None
    #: Seed from which each rank derives its own.
    seed: int = 0
    #: Whether ranks are bound to cores.
    bind: bool = True
    #: Further entries of the config that the constructor of the model class gets.
    config: dict[str, Any] = field(default_factory=dict)
    #: Options of a `Model`'s step.
    model_options: dict[str, Any] = field(default_factory=dict)
    #: Number of steps of a rank between two lines of its record.
    every: int = 40
    #: Number of epochs between two checkpoints; 0: no checkpoints.
    checkpoint: int = 0
    #: Number of newest checkpoints that are not deleted.
    keep: int = 3
    #: Time in seconds to write a checkpoint and exit after a scheduler's signal; 0: ranks are killed at once.
    grace: float = 30.0
    #: Maximal number of restarts from the newest checkpoint after a failure.
    restarts: int = 0
    #: After the death of a process: "continue" starts the ranks again from a copy in memory, "stop" ends the run.
    on_death: str = "stop"
    #: Maximal number of deaths for "continue".
    max_deaths: int = 100
    #: Number of epochs without an improvement after which the run stops; None: no limit.
    patience: int | None = None
    #: Metric whose best checkpoint is not deleted, and "min" or "max".
    keep_best: list[str] | None = None
    #: Whether the class's ``scale_lr(size)`` is called.
    scale_lr: bool = False
    #: Whether ``shared_lr`` rises over five epochs to its value times the number of ranks; None: under BSP and Swap.
    warmup: bool | None = None
    #: Whether a timeline of the ranks is recorded, in ``timeline.json``.
    timeline: bool = False
    #: ``"latest"``, or a checkpoint's path.
    resume: str | None = None

    def make_rule(self) -> rules.Rule:
        """Make the exchange rule.  BSP averages parameters, since a model class compiles its own steps.

        Raises
        ------
        SettingsError
            If the rule has no such option, or a value is wrong.
        """
        rule_class, options = RULES[self.rule.lower()], self.rule_options
        if rule_class is rules.EAMSGD:
            raise SettingsError("rule: EAMSGD needs the velocities, and a class doesn't name them: take EASGD")
        names = [name for name in inspect.signature(rule_class).parameters if name != "exclude"]
        for option in options:
            if option not in names:
                expected = ", ".join(names) or "none"
                raise SettingsError(f"rule_options: {self.rule} has no {option!r}: expected one of {expected}")
        if rule_class is rules.BSP:
            # The instance on each rank determines whether gradients can be exchanged: `contract.compile_model`.
            if options.get("average") not in (None, "gradient", "params"):
                raise SettingsError(
                    f"rule_options.average: expected 'gradient' or 'params', got {options['average']!r}"
                )
            options = {**options, "average": "params"}
        try:
            return rule_class(**options)
        except (TypeError, ValueError) as error:
            raise SettingsError(f"rule_options: {error}") from None

    @property
    def saves_on_signal(self) -> bool:
        """Whether ranks write a checkpoint at a scheduler's signal."""
        return bool(self.checkpoint and self.grace)

    @property
    def on_gpu(self) -> bool:
        """Whether ranks compute on GPUs."""
        return self.devices[0] != "cpu"

    def save(self, path: Path) -> None:
        """Write the settings as a JSON session file."""
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Settings:
        """Read settings from a file written by `save`."""
        settings = json.loads(path.read_text())
        return cls(**{**settings, "devices": tuple(settings["devices"]), "hosts": tuple(settings["hosts"])})


#: Keys of session files, the environment and ``--set``; ``model`` sets both ``modelfile`` and ``modelclass``.
KEYS = ("model", "ranks", *(setting.name for setting in dataclasses.fields(Settings)))


def read_session(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a session file: ``.toml``, ``.json`` as `Settings.save` writes it, or else Theano-MPI's KEY=VALUE.

    Raises
    ------
    SettingsError
        If the file can't be read or parsed, or has an unknown key.
    """
    path = Path(path)
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: expected a session file: {error}") from None
    if path.suffix not in (".json", ".toml"):
        try:
            return key_value.to_settings(key_value.parse(text))
        except ValueError as error:
            raise SettingsError(f"{path}: {error}") from None
    try:
        settings = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except ValueError as error:
        raise SettingsError(f"{path}: {error}") from None
    if not isinstance(settings, dict):
        raise SettingsError(f"{path}: expected settings by name, got {settings!r}")
    _check_keys(settings, str(path))
    return settings


def _check_keys(settings: Mapping[str, Any], source: str) -> None:
    for key in settings:
        if key not in KEYS:
            similar = difflib.get_close_matches(key, KEYS)
            raise SettingsError(
                f"{source}: {key!r} is not a setting"
                + (f"; similar: {', '.join(similar)}" if similar else "")
                + f"; for an argument of the class, config.{key}. Settings are {', '.join(sorted(KEYS))}"
            )


def parse_set(text: str) -> dict[str, Any]:
    """Parse ``key=value``, or ``key.name=value`` for one entry of a table.

    Examples
    --------
    >>> parse_set("rule_options.period=4")
    {'rule_options': {'period': 4}}
    """
    key, equals, value = text.partition("=")
    if not equals:
        raise SettingsError(f"--set: expected KEY=VALUE, got {text!r}")
    key, _, rest = key.strip().partition(".")
    _check_keys({key: None}, "--set")
    if rest:
        return {key: {rest: _parse_value(value)}}
    return {key: _parse_value(value)}


def _parse_value(text: str) -> Any:
    """Parse a TOML value; return any other text unchanged."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text.strip()


def read_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings in environment variables such as SYNKHRONOS_DEVICES."""
    settings = {}
    for name, value in environment.items():
        key = name.removeprefix(PREFIX).lower()
        if name.startswith(PREFIX) and key in KEYS:  # other packages read other variables
            settings[key] = _parse_value(value)
    return settings


def join_tables(pieces: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge settings of one source; later ones override earlier ones, and tables are merged entry by entry."""
    joined: dict[str, Any] = {}
    for piece in pieces:
        for key, value in piece.items():
            if isinstance(value, Mapping) and isinstance(joined.get(key), Mapping):
                value = {**joined[key], **value}
            joined[key] = value
    return joined


def merge_sources(sources: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge settings of several sources; earlier sources override later ones.

    If an earlier source names another rule, the options of a later source's rule are dropped.  If it names devices, a
    later source's number of ranks is dropped.  If it has a number of ranks, a later source's GPUs are dropped, but not
    the device ``cpu``.
    """
    merged: dict[str, Any] = {}
    for source in map(_split_model, reversed(sources)):
        rule = merged.get("rule")
        if rule is not None and "rule" in source and str(source["rule"]).lower() != str(rule).lower():
            merged.pop("rule_options", None)  # options of another rule
        if "devices" in source:
            merged.pop("ranks", None)
        elif "ranks" in source and merged.get("devices") is not None:  # the number of ranks determines the devices
            merged["devices"] = "cpu" if set(_split_names(merged["devices"])) == {"cpu"} else None
        merged = join_tables([merged, source])
    return merged


def _split_model(source: Mapping[str, Any]) -> Mapping[str, Any]:
    """Add ``modelfile`` and ``modelclass`` to settings with ``model``, ``FILE:CLASS``."""
    if "model" not in source:
        return source
    name, _, class_name = str(source["model"]).rpartition(":")
    if not name:
        raise SettingsError(f"model: expected FILE:CLASS, got {source['model']!r}")
    return {**source, "modelfile": name, "modelclass": class_name}


def resolve(sources: Sequence[Mapping[str, Any]], source_path: str | os.PathLike[str] | None = None) -> Settings:
    """Merge and check settings.

    Parameters
    ----------
    sources : sequence of dict
        Settings of the command line, the environment and the session file; earlier ones override later ones.
    source_path : path, optional
        Session file or script, whose folder is also searched for the model file.

    Raises
    ------
    SettingsError
        If a setting is missing or wrong; the message begins with its name.
    """
    merged = merge_sources(sources)
    name, class_name = _get_text(merged, "modelfile"), _get_text(merged, "modelclass")
    if not name:
        raise SettingsError(
            "modelfile: expected the file to train: name a session file, or give --set model=FILE:CLASS"
        )
    if not class_name:
        raise SettingsError("modelclass: expected the class to train; name a session file, or model = 'FILE:CLASS'")
    folders = [_get_path(merged, "root"), os.getcwd(), source_path and os.path.dirname(os.path.abspath(source_path))]
    root, module = find_module(name, class_name, [os.fspath(folder) for folder in folders if folder])
    n_ranks = None if merged.get("ranks") is None else _check_integer(merged["ranks"], "ranks", 1, MAX_RANKS_PER_HOST)
    hosts = _parse_hosts(merged.get("hosts"), n_ranks)
    if hosts:
        devices = _choose_first_hosts_devices(hosts[0], merged.get("devices"))
        hosts[0] = Host(hosts[0].name, len(devices))
    else:
        devices = _choose_devices(merged.get("devices"), n_ranks)
    if len(devices) > MAX_RANKS_PER_HOST:
        raise SettingsError(f"devices: expected at most {MAX_RANKS_PER_HOST}, got {len(devices)}")
    rule = find_rule_name(_get_text(merged, "rule") or Settings.rule)
    others = {key: check(merged[key], key) for key, check in _CHECKS.items() if merged.get(key) is not None}
    settings = Settings(
        modelfile=module,
        modelclass=class_name,
        root=root,
        devices=devices,
        hosts=tuple(host.name if host.n_ranks is None else f"{host.name}:{host.n_ranks}" for host in hosts),
        rule=rule,
        rule_options=_check_table(merged, "rule_options"),
        folder=os.path.abspath(_get_path(merged, "folder") or _make_folder_name(class_name, rule)),
        config=_check_config(merged),
        model_options=_check_model_options(merged),
        keep_best=_check_metric(merged.get("keep_best")),
        resume=_get_path(merged, "resume"),
        **others,
    )
    settings.make_rule()
    return _check_folder(settings)


def _check_folder(settings: Settings) -> Settings:
    """Check the run's folder, and the checkpoint to resume from."""
    folder = Path(settings.folder)
    for name in ("checkpoint", "keep_best", "resume", "on_death"):
        value = getattr(settings, name)
        if value and value != "stop" and find_spec("safetensors") is None:
            raise SettingsError(f"{name}: needs safetensors: pip install 'synkhronos[training]'")
    if settings.restarts and not (settings.checkpoint or settings.keep_best):
        raise SettingsError("restarts: needs checkpoints: set 'checkpoint', the number of epochs between two")
    if (folder / "checkpoints").exists() and not (folder / "checkpoints").is_dir():
        raise SettingsError(f"folder: {folder / 'checkpoints'} has to be a folder, or nothing yet")
    if settings.resume is None:
        if (folder / SETTINGS).exists() and any(any(folder.glob(pattern)) for pattern in _RESULTS):
            raise SettingsError(f"folder: {folder} has a run already: name another, or go on with --resume")
        return settings
    if settings.resume == "latest":
        if not list_checkpoints(folder / "checkpoints"):
            raise SettingsError(
                f"resume: expected a checkpoint in {folder / 'checkpoints'}, found none: folder says which run goes on"
            )
        return settings
    path = Path(settings.resume).absolute()
    if not (path / "meta.json").exists():
        raise SettingsError(f"resume: expected 'latest' or a checkpoint's folder, got {settings.resume!r}")
    return dataclasses.replace(settings, resume=str(path))


def find_rule_name(text: str) -> str:
    """Return the name of a rule's class, for its name in upper or lower case."""
    if text.lower() not in RULES:
        names = ", ".join(sorted(kind.__name__ for kind in RULES.values()))
        raise SettingsError(f"rule: expected one of {names}, got {text!r}")
    return RULES[text.lower()].__name__


def get_rule_options(rule: rules.Rule) -> dict[str, Any]:
    """Return the options of a rule that differ from their defaults, by name."""
    options = {}
    for name, parameter in inspect.signature(type(rule)).parameters.items():
        value = getattr(rule, name, parameter.default)
        if value == parameter.default:
            continue
        if callable(value):
            raise SettingsError(f"{name}: a rule that is started with init() takes numbers and words, got {value!r}")
        options[name] = value
    return options


# -- the model's file ------------------------------------------------------------------------------------


def find_module(name: str, class_name: str, folders: Sequence[str]) -> tuple[str, str]:
    """Find the file of the model class, without importing it; return a folder for `sys.path`, and the module's name.

    Parameters
    ----------
    name : str
        A path such as ``models/mlp.py``, or a module such as ``models.mlp``.
    class_name : str
        Name of the model class.
    folders : list of str
        Folders in which the file is searched; for a module, before those in `sys.path`.

    Raises
    ------
    SettingsError
        If the file does not exist, has a syntax error, or does not define the class.
    """
    path, root = _find_file(name, folders)
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except SyntaxError as error:
        raise SettingsError(f"modelfile: {path}, line {error.lineno}: {error.msg}") from None
    names = _find_names(tree)
    if class_name not in names and "*" not in names:
        classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
        raise SettingsError(f"modelclass: {path} has no {class_name!r}: it has {', '.join(classes) or 'no class'}")
    parts = path.relative_to(root).with_suffix("").parts
    if any("." in part for part in parts[:-1]):  # such a folder can't be a package: import the file alone
        root, parts = path.parent, parts[-1:]
    if "." in parts[-1]:
        raise SettingsError(f"modelfile: {path}: a module's name has no dot: rename the file")
    if parts[0] in sys.modules and parts[0] in {*sys.stdlib_module_names, "numpy", "synkhronos"}:
        raise SettingsError(f"modelfile: {path}: {parts[0]!r} is a module that every run imports: rename the file")
    module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    return str(root), module


def _find_file(name: str, folders: Sequence[str]) -> tuple[Path, Path]:
    """Find the file, and the folder to which the module's name is relative."""
    if name.endswith(".py"):
        for folder in folders:
            path = Path(folder, name)
            if path.is_file():
                is_inside = not os.path.isabs(name) and ".." not in Path(name).parts
                return path.absolute(), Path(folder).absolute() if is_inside else path.absolute().parent
        raise SettingsError(f"modelfile: there is no file {name} in {' or '.join(dict.fromkeys(folders))}")
    relative = name.replace(".", "/")
    for folder in [*folders, *sys.path]:
        for path in (Path(folder, f"{relative}.py"), Path(folder, relative, "__init__.py")):
            if path.is_file():
                return path.absolute(), Path(folder).absolute()
    raise SettingsError(
        f"modelfile: expected a file or a module, got {name!r}: there is no {relative}.py in "
        f"{' or '.join(dict.fromkeys(folders))}, nor where Python looks for modules"
    )


def _find_names(tree: ast.Module) -> set[str]:
    """Find the names that a module binds at its top level, also within ``if`` or ``try``."""
    names: set[str] = set()
    stack: list[ast.AST] = list(tree.body)
    while stack:
        node = stack.pop()
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        else:
            names |= {node.id} if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else set()
            stack += ast.iter_child_nodes(node)
    return names


# -- values ----------------------------------------------------------------------------------------------


def _get_text(settings: Mapping[str, Any], key: str) -> str | None:
    value = settings.get(key)
    if value is None or isinstance(value, str):
        return value or None
    raise SettingsError(f"{key}: expected a text, got {value!r}")


def _get_path(settings: Mapping[str, Any], key: str) -> str | None:
    path = _get_text(settings, key)
    return path and os.path.expanduser(path)


def _check_table(settings: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = settings.get(key, {})
    if not isinstance(value, Mapping):
        raise SettingsError(f"{key}: expected a table of names and values, got {value!r}")
    try:
        json.dumps(value)  # `Settings.save` writes them
    except (TypeError, ValueError) as error:
        raise SettingsError(f"{key}: expected numbers, texts, lists and tables: {error}") from None
    return dict(value)


def _check_metric(value: Any) -> list[str] | None:
    if value is None:
        return None
    try:
        name, mode = parse_monitored_metric(value, "keep_best")
    except TypeError as error:
        raise SettingsError(str(error)) from None
    if name not in _METRICS:
        raise SettingsError(f"keep_best: expected one of {', '.join(_METRICS)}, got {name!r}")
    return [name, mode]


def _check_config(settings: Mapping[str, Any]) -> dict[str, Any]:
    config = _check_table(settings, "config")
    for key, hint in _RUN_CONFIG.items():
        if key in config:
            raise SettingsError(f"config: {key!r} is given by the run: {hint}")
    return config


def _check_model_options(settings: Mapping[str, Any]) -> dict[str, Any]:
    options = _check_table(settings, "model_options")
    try:
        check_model_options(options)
    except (TypeError, ValueError) as error:
        raise SettingsError(f"model_options.{error}") from None
    return options


def _check_integer(value: Any, key: str, minimum: int, maximum: int | None = None) -> int:
    try:
        checked = check_at_least(value, key, minimum)
    except (TypeError, ValueError) as error:
        raise SettingsError(str(error)) from None
    if maximum is not None and checked > maximum:
        raise SettingsError(f"{key}: expected at most {maximum}, got {checked}")
    return checked


def _check_seconds(value: Any, key: str) -> float:
    if not is_number(value) or not 0 <= value < math.inf:
        raise SettingsError(f"{key}: expected a number of seconds, got {value!r}")
    return float(value)


def _check_flag(value: Any, key: str) -> bool:
    word = str(value).lower()
    if word not in _TRUE | _FALSE:
        raise SettingsError(f"{key}: expected true or false, got {value!r}")
    return word in _TRUE


def _check_on_death(value: Any, key: str) -> str:
    if value not in ("stop", "continue"):
        raise SettingsError(f"{key}: expected 'stop' or 'continue', got {value!r}")
    return str(value)


#: Checks of settings with single values; a check takes the value and its key, and returns the value in a plain type.
_CHECKS: dict[str, Callable[[Any, str], Any]] = {
    **dict.fromkeys(("epochs", "every", "keep", "max_deaths", "patience"), partial(_check_integer, minimum=1)),
    **dict.fromkeys(("checkpoint", "restarts"), partial(_check_integer, minimum=0)),
    "seed": partial(_check_integer, minimum=0, maximum=2**32 - 1),
    **dict.fromkeys(("bind", "scale_lr", "timeline", "warmup"), _check_flag),
    "grace": _check_seconds,
    "on_death": _check_on_death,
}


def _split_names(devices: Any) -> list[str]:
    if isinstance(devices, str):
        devices = devices.split(",")
    if not isinstance(devices, list | tuple) or not all(isinstance(name, str) for name in devices):
        raise SettingsError(f"devices: expected names such as cuda0 and cpu, got {devices!r}")
    return [name.strip() for name in devices if name.strip()]


def _choose_devices(devices: Any, count: int | None) -> tuple[str, ...]:
    """Choose the device of each rank; by default a rank for each visible GPU, or without GPUs for each core."""
    n_gpu = get_n_gpu()
    if devices is None:
        if n_gpu and count is not None and count > n_gpu:
            raise SettingsError(f"ranks: expected at most {n_gpu}, one for each GPU, got {count}; or devices = 'cpu'")
        return tuple(f"cuda{i}" for i in range(n_gpu)[:count]) or ("cpu",) * (count or count_available_cores())
    names = _split_names(devices)
    if not names:
        raise SettingsError(f"devices: expected at least one name, such as cuda0 or cpu, got {devices!r}")
    if names == ["cpu"] and count is not None:
        names *= count
    if count is not None and count != len(names):
        raise SettingsError(f"ranks: expected {len(names)}, the number of devices, got {count}")
    if set(names) == {"cpu"}:
        return tuple(names)
    chosen = []
    for name in names:
        match = re.fullmatch(r"(?:cuda|gpu)(\d+)", name)
        if ":" in name:
            raise SettingsError(
                f"devices: {name!r} is on another host: these are devices of this machine; hosts = ['a', 'b:3'] names "
                "machines, and how many of its GPUs or cores each is to use"
            )
        if match is None:
            also = "; cpu can't be mixed with GPUs" if name == "cpu" else ""
            raise SettingsError(f"devices: expected cuda0, gpu0 and so on, or cpu alone, got {name!r}{also}")
        if int(match[1]) >= n_gpu:
            present = f"cuda0 to cuda{n_gpu - 1}" if n_gpu else "no GPU"
            raise SettingsError(
                f"devices: {name} is not there: this machine shows {present}; cpu,cpu computes on two of its cores"
            )
        chosen.append(f"cuda{int(match[1])}")
    if len(set(chosen)) != len(chosen):
        raise SettingsError(f"devices: expected each GPU once, got {', '.join(names)}")
    return tuple(chosen)


def _parse_hosts(hosts: Any, n_ranks: int | None) -> list[Host]:
    """Parse hosts and their numbers of ranks, None if unset; return no hosts for this machine alone."""
    if isinstance(hosts, str) and hosts != "all":
        hosts = [host for host in hosts.split(",") if host.strip()]
    try:
        parsed = parse_hosts([] if hosts is None else hosts)
    except (TypeError, ValueError, OSError) as error:
        raise SettingsError(str(error)) from None
    if parsed and (process := read_mpi_rank_and_size()) is not None:
        raise SettingsError(
            f"hosts: {process[1]} of these commands were started, and one starts the ranks of all hosts: start it once "
            "(srun --nodes=1 --ntasks=1, or without srun or mpirun)"
        )
    return [Host(host.name, host.n_ranks or n_ranks) for host in parsed]


def _choose_first_hosts_devices(first: Host, devices: Any) -> tuple[str, ...]:
    """Choose the device of each rank on the first of several hosts; other hosts use devices of the same kind."""
    if devices is not None and _split_names(devices) == ["cpu"]:
        return ("cpu",) * (first.n_ranks or count_available_cores())
    chosen = _choose_devices(devices, first.n_ranks)
    if set(chosen) != {"cpu"} and chosen != tuple(f"cuda{i}" for i in range(len(chosen))):
        raise SettingsError(
            f"devices: expected cpu, or cuda0 to cuda{len(chosen) - 1} in this order, for several hosts, got "
            f"{', '.join(chosen)}: each host's CUDA_VISIBLE_DEVICES says which GPUs are meant"
        )
    return chosen


def _make_folder_name(class_name: str, rule: str) -> str:
    return os.path.join("runs", f"{class_name}-{rule}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")
