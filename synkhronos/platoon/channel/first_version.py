"""Classes of Platoon's first version, with its names and order of arguments."""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from synkhronos.platoon.channel.controller import Controller
from synkhronos.platoon.channel.controller_process import ARGUMENTS_VARIABLE
from synkhronos.platoon.channel.worker import Worker
from synkhronos.platoon.param_sync import ParamSyncRule


class Lieutenant(Controller):
    """A `Controller` that gets its workers from the launcher, not from command-line arguments.

    ``port`` is the data port, and ``hwm`` the bound of the queue of mini-batches; ``cport`` is ignored.
    """

    def __init__(self, port: int | None = None, cport: int | None = None, hwm: int = 10):
        super().__init__(data_port=port, data_hwm=hwm, **json.loads(os.environ.get(ARGUMENTS_VARIABLE, "{}")))

    def init_control(self, port: int) -> None:
        """Do nothing: workers find their controller by themselves."""

    def serve(self) -> int:
        """Answer requests until all workers have ended; exit if one has failed."""
        status = super().serve()
        if status:
            sys.exit(status)
        return status

    def _answer_request(self, req: Any, worker_id: int, req_info: Any) -> Any:
        """Call ``handle_control(req)`` or ``handle_control(req, worker_id)``."""
        handle: Any = self.handle_control
        return handle(req, worker_id) if len(inspect.signature(handle).parameters) > 1 else handle(req)


class Soldier(Worker):
    """A `Worker` with the first version's methods; ``port`` and ``cport`` are the data and the control port."""

    def __init__(self, port: int | None = None, cport: int | None = None, socket_timeout: int = 300000, hwm: int = 10):
        super().__init__(cport, port, socket_timeout, hwm)

    def init_control_sock(self, port: int) -> None:
        """Do nothing: the launcher has connected the worker with its controller."""

    lock_params = Worker.lock
    unlock_params = Worker.unlock

    def init_shared_params(  # type: ignore[override]
        self, job_name: str, params: Sequence[Any], param_sync_rule: ParamSyncRule, cleanup: bool = False
    ) -> None:
        """Map the shared parameters as `Worker.init_shared_params`; ``job_name`` and ``cleanup`` are ignored."""
        super().init_shared_params(params, param_sync_rule)
