"""Runs of the launcher that an exchange rule starts: the methods of Theano-MPI's rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar


class LaunchableRule:
    """Mixin of rules that start a run by `init`, and wait for its end by `wait`."""

    #: Run that `init` has started; None before, and after `wait`.
    _launched_run: Any = None
    #: Set by `register_launcher`.
    _launch: ClassVar[Callable[..., Any]]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_launched_run": None}  # a process of the master

    def init(
        self,
        devices: Sequence[str] | str | None = None,
        modelfile: str = "",
        modelclass: str = "",
        **settings: Any,
    ) -> None:
        """Start to train a model class by this rule in new processes, without waiting for them; see `wait`.

        Parameters
        ----------
        devices : list of str, optional
            Device of each rank: ``cpu``, or ``cuda0``, ``gpu0`` and so on.
        modelfile, modelclass : str
            Module, such as ``models.mlp`` or ``models/mlp.py``, and the class in it.
        **settings
            Other settings of a session file, such as ``folder``, ``epochs`` and ``config``.

        Raises
        ------
        SettingsError
            If a setting is wrong; no process is started.
        RuntimeError
            If `init` was called already.

        Examples
        --------
        .. code-block:: python

            rule = rules.BSP()
            rule.init(devices=["cuda0", "cuda1"], modelfile="models.mlp", modelclass="MLP", epochs=10)
            folder = rule.wait()
        """
        if self._launched_run is not None:
            raise RuntimeError("init() was called already: call wait(), or make another rule")
        self._launched_run = type(self)._launch(self, devices, modelfile, modelclass, **settings)

    def wait(self) -> Any:
        """Wait for the end of the run that `init` has started, and return its folder.

        Raises
        ------
        RuntimeError
            If the run has failed, or `init` was not called.
        """
        if self._launched_run is None:
            raise RuntimeError("wait(): expected a call of init() before it")
        run, self._launched_run = self._launched_run, None
        return run.wait()


def register_launcher(launch: Callable[..., Any]) -> None:
    """Register the function that `Rule.init` calls to start a run.

    ``synkhronos/__init__.py`` registers it, because rules are in a lower layer than the launcher and cannot import it.

    Parameters
    ----------
    launch : callable
        Takes the rule and the arguments of `Rule.init`; returns the run.
    """
    LaunchableRule._launch = launch
