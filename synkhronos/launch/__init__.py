"""Start of training runs: ``python -m synkhronos train SESSION``, or ``rule.init(...)`` and ``rule.wait()``.

::

    command line, environment, session file
        │ settings.resolve
    Settings, saved as settings.json in the run's folder
        │
    supervisor       copies the output of the ranks, records the exit status
        │ starts
    master           rank 0: forks the other ranks
        │ rank_main.prepare_rank, build_instance, train_instance
    rank 0 ... n-1   each trains an instance of the user's class

``import synkhronos`` does not import this package.
"""

from synkhronos.launch.model import Model
from synkhronos.launch.settings import SettingsError

__all__ = ["Model", "SettingsError"]
