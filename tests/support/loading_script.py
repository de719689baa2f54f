"""A program with loaders, whose processes a test kills: python loading_script.py FOLDER HOW."""

import json
import os
import signal
import sys
import time

import numpy as np
from loading_sources import SlowPictures

import synkhronos as synk
from synkhronos import ranks
from synkhronos.loading import Loader


def main(folder, how):
    """Read batches from a slow source; `how` says with which ranks, handlers and end."""
    if how != "alone":
        synk.fork(2, use_gpu=False)
    loader = Loader(SlowPictures(1000, 0.01), processes=2)
    # A program that reads without ranks has no workers.
    batches = loader.arrays(0, 10) if how == "alone" else loader.epoch(0, 10)
    if how == "handles":
        signal.signal(signal.SIGTERM, lambda *_: None)
    next(batches)
    workers = [] if how == "alone" else list(ranks.get_session().worker_pids.values())
    process_ids = {"workers": workers, "loaders": loader._pool.pids}
    with open(f"{folder}/unfinished", "w") as file:
        json.dump(process_ids, file)
    os.replace(f"{folder}/unfinished", f"{folder}/processes.json")
    if how == "exits":
        sys.exit(3)
    count = 1
    for batch in batches:
        count += 1 if how == "alone" else bool(np.asarray(loader.data[0])[batch].size)
        with open(f"{folder}/count", "w") as file:
            file.write(str(count))
    time.sleep(60)


if __name__ == "__main__":
    main(*sys.argv[1:])
