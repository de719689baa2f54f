"""Training runs of model classes with Theano-MPI's interface.

``python -m synkhronos train SESSION`` starts a run, or in Python ``start_run(...)`` and ``wait()``.

::

    command line, environment, session file
        │ configuration: resolve_settings
    Settings, saved as settings.json in the run's folder
        │
    supervision: the supervisor     copies the output of the ranks, records the exit status
        │ starts
    rank: the master, rank 0        forks the other ranks
        │ rank_functions: prepare_rank, build_model, train_model
    rank 0 ... n-1                  each trains an instance of the user's model class (`model_class`)

``import synkhronos`` does not import this package.
"""

from synkhronos.launcher.background_run import BackgroundRun, start_run
from synkhronos.launcher.configuration.settings import SettingsError
from synkhronos.launcher.model_class.model import Model

__all__ = ["BackgroundRun", "Model", "SettingsError", "start_run"]
