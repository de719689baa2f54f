"""Workers and their controller; `Soldier` and `Lieutenant` are their names in the first version of Platoon."""

from synkhronos.platoon.channel.controller import Controller
from synkhronos.platoon.channel.first_version import Lieutenant, Soldier
from synkhronos.platoon.channel.worker import Worker

__all__ = ["Controller", "Lieutenant", "Soldier", "Worker"]
