"""Python runs this in every process that has the folder on its path: see `pretend`."""

import os

if os.environ.get("PRETENDED_GPUS"):
    try:
        import pretend

        pretend.install()
    except ImportError:  # another Python, which starts the hosts
        pass
