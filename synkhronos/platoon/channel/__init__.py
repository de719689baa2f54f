"""Workers and their controller; `Soldier` and `Lieutenant` are their names in the first version of Platoon."""

from synkhronos.platoon.channel.controller import Controller, Lieutenant
from synkhronos.platoon.channel.worker import Soldier, Worker

__all__ = ["Controller", "Lieutenant", "Soldier", "Worker"]
