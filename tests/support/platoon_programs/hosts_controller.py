"""A controller on each of several hosts: it counts its own workers' requests, and sends mini-batches of its own."""

import os
import socket
import sys
from multiprocessing import Process

import numpy as np
from platoon.channel import Controller


class OfOneHost(Controller):
    n_requests = 0

    def send(self):
        self.init_data(4567)
        for i in range(6):
            self.send_mb([np.full(3, 10 * is_second + i)])
        self.asocket.close()

    def handle_control(self, req, worker_id, req_info):
        if req == "hello":
            return os.getpid(), socket.gethostname(), sorted(self._workers), self._local_size, self._global_size
        self.n_requests += 1
        return "stop" if self.n_requests > 6 else "train"


args = Controller.default_parser().parse_args()
controller = OfOneHost(**Controller.default_arguments(args))
is_second = socket.gethostname() == "b"
Process(target=controller.send).start()
status = controller.serve()
print("served with status", status)
if is_second and args.worker_args == "controller":
    sys.exit("there is no summary")
sys.exit(status)
