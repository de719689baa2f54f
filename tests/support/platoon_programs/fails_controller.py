"""A controller whose workers fail, or which fails itself; it sends mini-batches that nobody takes."""

import sys
from multiprocessing import Process

import numpy as np
from platoon.channel import Controller


class Fails(Controller):
    def send(self):
        self.init_data(4567, data_hwm=2)
        while True:
            self.send_mb([np.zeros(3)])

    def send_three(self):
        self.init_data(4568)
        for _ in range(3):
            self.send_mb([np.zeros(3)])

    def handle_control(self, req, worker_id, req_info):
        if req == "raise":
            raise KeyError("no such decision")
        return "train"


if __name__ == "__main__":
    args = Controller.default_parser().parse_args()
    if args.worker_args == "controller_init":
        raise RuntimeError("the controller has no data")
    controller = Fails(**Controller.default_arguments(args))
    Process(target=controller.send).start()
    Process(target=controller.send_three).start()
    print("ready", flush=True)
    if args.worker_args == "controller_main":
        raise RuntimeError("the controller has no plan")
    sys.exit(controller.serve())
