"""PyTorch's side of `benchmarks.gpu_resnet`, `gpu_rules` and `gpu_zoo`: a network under DistributedDataParallel.

It is torchvision's ResNet, or that of `benchmarks._torch_networks` which the settings name.

Run as a script of its own, with the settings as JSON in its only argument: PyTorch is never loaded beside JAX.  It
starts a process for each GPU, and the first prints what it measured, as JSON.

Arrays are laid out channels last, cuDNN chooses its algorithms by trying them, TF32 is allowed, and with bfloat16 the
network runs under autocast; compiled, under ``torch.compile``.  Host images are pinned batches, prepared beforehand in
the GPU's layout, and copied while the GPU computes.  With a ``period``, it is PyTorch's post-local SGD: processes train
alone, and average their parameters after so many steps.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from statistics import median
from time import perf_counter
from typing import Any

from benchmarks._training import join_group, run_processes


def network(settings: dict[str, Any]) -> Any:
    """Return the network named in the settings, or torchvision's ResNet of their size."""
    if "network" in settings:
        from benchmarks._torch_networks import make

        return make(settings)
    from torchvision.models.resnet import Bottleneck, ResNet

    # A narrower network is torchvision's with narrower blocks: to try the benchmark, not to compare.
    return ResNet(Bottleneck, settings["blocks"], settings["classes"], width_per_group=settings["width"])


class Side:
    """One process's network, and its images.

    Parameters
    ----------
    rank : int
    settings : dict
        As `benchmarks.gpu_resnet` writes them.
    """

    def __init__(self, rank: int, settings: dict[str, Any]):
        import torch

        torch.manual_seed(rank)
        torch.backends.cudnn.benchmark = True
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
        self._torch, self._settings = torch, settings
        self._gpu = settings["device"] == "gpu"
        self._device = torch.device("cuda", rank) if self._gpu else torch.device("cpu")
        layout = torch.channels_last
        model = network(settings)
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        model = model.to(self._device, memory_format=layout)
        devices = [rank] if self._gpu else None
        self._model = torch.nn.parallel.DistributedDataParallel(model, device_ids=devices)
        if settings["compiled"]:
            self._model = torch.compile(self._model)
        self._optimizer: Any = torch.optim.SGD(self._model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
        if settings.get("period"):
            self._train_alone(settings["period"])
        self._loss: Any = torch.nn.CrossEntropyLoss()
        if "network" in settings:
            from benchmarks._torch_networks import loss

            self._loss = loss
        n, size = settings["batch_size"], settings["size"]
        self._host = []
        for _ in range(4):
            images = torch.randint(256, (n, 3, size, size), dtype=torch.uint8).contiguous(memory_format=layout)
            labels = torch.randint(settings["classes"], (n,))
            self._host.append((images.pin_memory(), labels.pin_memory()) if self._gpu else (images, labels))
        self._kept = self._scaled(self._host[0][0].to(self._device)), self._host[0][1].to(self._device)
        self._turn = 0

    def _train_alone(self, period: int) -> None:
        from torch import distributed
        from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as hook
        from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
        from torch.distributed.optim import PostLocalSGDOptimizer

        alone, _ = distributed.new_subgroups(1)
        self._model.register_comm_hook(hook.PostLocalSGDState(None, alone, 0), hook.post_localSGD_hook)
        self._optimizer = PostLocalSGDOptimizer(self._optimizer, PeriodicModelAverager(period, 0))

    def _scaled(self, pixels: Any) -> Any:
        return (pixels.to(self._torch.float32) - 127.5) / 64

    def batch(self, where: str) -> tuple[Any, Any]:
        """Return a batch on the GPU: the cached one, or the next one from the host."""
        if where == "gpu":
            return self._kept
        images, labels = self._host[self._turn % len(self._host)]
        self._turn += 1
        images, labels = (each.to(self._device, non_blocking=True) for each in (images, labels))
        return self._scaled(images), labels

    def step(self, where: str) -> Any:
        """Start a training step; return the loss without waiting for it."""
        images, labels = self.batch(where)
        bfloat16 = self._settings["precision"] == "bfloat16"
        with self._torch.autocast(self._device.type, self._torch.bfloat16) if bfloat16 else nullcontext():
            loss = self._loss(self._model(images), labels)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        return loss.detach()

    def wait(self) -> None:
        """Wait for the GPU, and for the other processes."""
        if self._gpu:
            self._torch.cuda.synchronize()
        self._torch.distributed.barrier()

    def measure(self, where: str) -> tuple[float, float, float]:
        """Return the first step's seconds, the median seconds of a step, and the last loss."""
        self.wait()
        start = perf_counter()
        self.step(where)
        self.wait()
        first = perf_counter() - start
        for _ in range(self._settings["warm"]):
            self.step(where)
        times = []
        for _ in range(self._settings["rounds"]):
            self.wait()
            start = perf_counter()
            losses = [self.step(where) for _ in range(self._settings["steps"])]
            if self._gpu:
                self._torch.cuda.synchronize()
            times.append((perf_counter() - start) / len(losses))
        return first, median(times), float(losses[-1])


def serve(rank: int, meeting: str, settings: dict[str, Any]) -> None:
    """Run one process of the group."""
    import torch

    join_group(rank, meeting, settings["n"], settings["device"] == "gpu")
    side = Side(rank, settings)
    results = {where: side.measure(where) for where in settings["where"]}
    if rank == 0:
        found = {"title": f"PyTorch {torch.__version__}", "results": results, "parameters": side.parameters}
        print(json.dumps(found), flush=True)
    torch.distributed.destroy_process_group()


def main() -> None:
    """Start the other processes; this one is rank 0."""
    settings = json.loads(sys.argv[1])
    run_processes(serve, settings["n"], settings)


if __name__ == "__main__":
    main()
