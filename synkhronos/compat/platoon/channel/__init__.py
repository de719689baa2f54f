"""Workers and their controller; `Soldier` and `Lieutenant` are their names in the first version of Platoon."""

from synkhronos.compat.platoon.channel.controller import Controller
from synkhronos.compat.platoon.channel.first_version import Lieutenant, Soldier
from synkhronos.compat.platoon.channel.worker import Worker

__all__ = ["Controller", "Lieutenant", "Soldier", "Worker"]
