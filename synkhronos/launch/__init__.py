"""How does a run start?

From the command line, ``python -m synkhronos train SESSION``, or from Python, ``rule.init(...)`` and ``rule.wait()``:

`settings`
    What a run is asked to do, from the command line, the environment and a file.
`modelfile`
    Where the user's class is.
`supervisor`
    The process that starts the ranks, reads what they print, and says how they ended.
`master`
    The process of rank 0, which forks the others.
`program`
    What each rank does.
`elsewhere`
    How what ranks of other hosts print comes to the supervisor.
`contract`, `recorder`
    What the class has to have, and what it is given.
`binding`
    Which cores each rank gets.
`command`, `check`, `doctor`
    The command line.
`handle`
    ``rule.init`` and ``rule.wait``.

For users:

`Model`
    A base class for new models (`model`).
`SettingsError`
    A setting is wrong.

Not imported by ``import synkhronos``.
"""

from synkhronos.launch.model import Model
from synkhronos.launch.settings import SettingsError

__all__ = ["Model", "SettingsError"]
