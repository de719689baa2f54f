"""Python runs this in every process that has the folder on its path: see `fake_gpus`."""

import os

if os.environ.get("FAKE_GPUS"):
    try:
        import fake_gpus

        fake_gpus.install()
    except ImportError:  # another Python, which starts the hosts
        pass
