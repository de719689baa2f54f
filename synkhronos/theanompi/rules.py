"""The module ``theanompi.rules``: rules with Theano-MPI's names, methods and class attributes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from synkhronos import exchange_rules
from synkhronos.launcher import BackgroundRun, start_run
from synkhronos.launcher.configuration.settings import convert_to_settings_error, merge_tables
from synkhronos.launcher.configuration.theano_mpi_session import parse_exchange_option

__all__ = ["ASGD", "BSP", "EASGD", "GOSGD"]


class _StartsRuns(exchange_rules.ExchangeRule):
    """Theano-MPI's methods of a rule: ``init`` starts a run, and ``wait`` waits for its end."""

    _run: BackgroundRun | None = None

    def init(
        self, devices: Sequence[str] | str | None = None, modelfile: str = "", modelclass: str = "", **settings: Any
    ) -> None:
        """Start a run by this rule; the arguments are those of `synkhronos.launcher.start_run`."""
        if self._run is not None:
            raise RuntimeError("init() was called already: call wait(), or make another rule")
        rule, settings = self._resolve(settings)
        self._run = start_run(rule, devices, modelfile, modelclass, **settings)

    def _resolve(self, settings: dict[str, Any]) -> tuple[exchange_rules.ExchangeRule, dict[str, Any]]:
        """Return the rule and the settings of the run."""
        return self, settings

    def wait(self) -> Path:
        """Wait for the end of the run, and return its folder; raise RuntimeError if it has failed."""
        if self._run is None:
            raise RuntimeError("wait(): expected a call of init() before it")
        run, self._run = self._run, None
        return run.wait()


class ASGD(_StartsRuns, exchange_rules.ASGD):
    """Theano-MPI's ASGD."""


class BSP(_StartsRuns, exchange_rules.BSP):
    """Bulk-synchronous training; set the class attributes before ``init``.

    Attributes
    ----------
    sync_type : {"cdd", "avg", "swap"}
        Values that ranks exchange after each step: gradients, or parameters; with ``"swap"`` pairs swap parameters.
    exch_strategy : str
        ``"nccl32"`` or ``"ar"``; ``"nccl16"`` exchanges in float16.
    """

    sync_type = "cdd"
    exch_strategy = "nccl32"

    def _resolve(self, settings: dict[str, Any]) -> tuple[exchange_rules.ExchangeRule, dict[str, Any]]:
        with convert_to_settings_error():
            names = ("sync_type", "exch_strategy")
            exchange = merge_tables(parse_exchange_option(name, getattr(self, name)) for name in names)
        rule = exchange_rules.Swap() if exchange.pop("rule", None) == "Swap" else self
        return rule, merge_tables([exchange, settings])


class EASGD(_StartsRuns, exchange_rules.EASGD):
    """Theano-MPI's EASGD."""


class GOSGD(_StartsRuns, exchange_rules.GoSGD):
    """Theano-MPI's GOSGD."""
