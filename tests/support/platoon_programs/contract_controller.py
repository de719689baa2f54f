"""A controller written for Platoon: hands out mini-batches from a process of its own, and counts."""

import os
import sys
from multiprocessing import Process

import numpy as np
from platoon.channel import Controller

N_BATCHES = 30


class Contract(Controller):
    def __init__(self, arguments):
        super().__init__(**arguments)
        self.n_promised = self.n_first = 0
        self.ranks = {}

    def start_sender(self):
        Process(target=self.send).start()

    def send(self):
        self.init_data(4567, data_hwm=3)
        for i in range(N_BATCHES):
            self.send_mb(
                [np.full((2, 3), i, "float32"), np.asarray(i), np.zeros((0, 4), bool), np.arange(6).reshape(2, 3).T]
            )
        self.asocket.close()

    def handle_control(self, req, worker_id, req_info):
        if req == "hello":
            self.ranks[worker_id] = req_info["rank"]
            return sorted(self._workers) == sorted([worker_id, *(self._workers - {worker_id})]), len(self._devices)
        if req == "next":
            if self.n_promised == N_BATCHES:
                return "stop"
            self.n_promised += 1
            return "train"
        if req == "first":
            self.n_first += 1
            return self.n_first == 1
        if req == "echo":
            return req_info
        return {"controller": os.getpid(), "ranks": self.ranks, "arguments": sys.argv[1:]}


if __name__ == "__main__":
    parser = Controller.default_parser()
    parser.add_argument("--patience", type=int, default=0)
    args = parser.parse_args()
    assert args.patience == 7
    controller = Contract(Controller.default_arguments(args))
    controller.start_sender()
    sys.exit(controller.serve())
