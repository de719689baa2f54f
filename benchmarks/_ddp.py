"""PyTorch's side of `benchmarks.gpu_resnet`, `gpu_rules` and `gpu_zoo`: a network under DistributedDataParallel.

The network is torchvision's ResNet, or one of `benchmarks._torch_networks` if the settings name it.

A script of its own, since PyTorch and JAX do not share a process.  Its only argument is the settings as JSON.  It
starts a process for each GPU; rank 0 prints the results as JSON.

Arrays have the layout channels-last, cuDNN selects its algorithms by benchmarking them, and TF32 is allowed.  With
bfloat16 the network runs under autocast.  Batches in host memory are pinned, prepared in the GPU's layout, and copied
while the GPU computes.  With a ``period``, training is PyTorch's post-local SGD: processes train without communication,
and average their parameters after every ``period`` steps.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from typing import Any

from benchmarks._training import join_group, measure_steps, run_processes


def make_network(settings: dict[str, Any]) -> Any:
    """Return the network named in the settings, or torchvision's ResNet of their size."""
    if "network" in settings:
        from benchmarks import _torch_networks

        return _torch_networks.make_network(settings)
    from torchvision.models.resnet import Bottleneck, ResNet

    # A smaller width makes the blocks alone narrower: enough to test the benchmark, not to compare networks.
    return ResNet(Bottleneck, settings["blocks"], settings["classes"], width_per_group=settings["width"])


class TorchTrainer:
    """Network of one process, with its batches.

    Parameters
    ----------
    rank : int
    settings : dict
        Settings of `benchmarks.gpu_resnet`.
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
        model = make_network(settings)
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        model = model.to(self._device, memory_format=layout)
        devices = [rank] if self._gpu else None
        self._model = torch.nn.parallel.DistributedDataParallel(model, device_ids=devices)
        if settings["compiled"]:
            self._model = torch.compile(self._model)
        self._optimizer: Any = torch.optim.SGD(self._model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
        if settings.get("period"):
            self._use_local_sgd(settings["period"])
        self._loss: Any = torch.nn.CrossEntropyLoss()
        if "network" in settings:
            from benchmarks._torch_networks import compute_loss

            self._loss = compute_loss
        n, size = settings["batch_size"], settings["size"]
        self._host_batches = []
        for _ in range(4):
            images = torch.randint(256, (n, 3, size, size), dtype=torch.uint8).contiguous(memory_format=layout)
            labels = torch.randint(settings["classes"], (n,))
            self._host_batches.append((images.pin_memory(), labels.pin_memory()) if self._gpu else (images, labels))
        self._device_batch = (
            self._scale_pixels(self._host_batches[0][0].to(self._device)),
            self._host_batches[0][1].to(self._device),
        )
        self._n_batches = 0

    def _use_local_sgd(self, period: int) -> None:
        from torch import distributed
        from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as hook
        from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
        from torch.distributed.optim import PostLocalSGDOptimizer

        own_group, _ = distributed.new_subgroups(1)
        self._model.register_comm_hook(hook.PostLocalSGDState(None, own_group, 0), hook.post_localSGD_hook)
        self._optimizer = PostLocalSGDOptimizer(self._optimizer, PeriodicModelAverager(period, 0))

    def _scale_pixels(self, pixels: Any) -> Any:
        return (pixels.to(self._torch.float32) - 127.5) / 64

    def next_batch(self, placement: str) -> tuple[Any, Any]:
        """Return a batch on the GPU: the one that stays there, or a copy of the next one in host memory."""
        if placement == "gpu":
            return self._device_batch
        images, labels = self._host_batches[self._n_batches % len(self._host_batches)]
        self._n_batches += 1
        images, labels = (array.to(self._device, non_blocking=True) for array in (images, labels))
        return self._scale_pixels(images), labels

    def start_step(self, placement: str) -> Any:
        """Start a training step; return the loss without waiting for it."""
        images, labels = self.next_batch(placement)
        bfloat16 = self._settings["precision"] == "bfloat16"
        with self._torch.autocast(self._device.type, self._torch.bfloat16) if bfloat16 else nullcontext():
            loss = self._loss(self._model(images), labels)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        return loss.detach()

    def measure(self, placement: str) -> dict[str, Any]:
        """Measure steps on images that are on the host or on the GPU."""
        return measure_steps(lambda: self.start_step(placement), self._settings)


def run_rank(rank: int, rendezvous: str, settings: dict[str, Any]) -> None:
    """Run one process of the group."""
    import torch

    join_group(rank, rendezvous, settings["n"], settings["device"] == "gpu")
    trainer = TorchTrainer(rank, settings)
    results = {placement: trainer.measure(placement) for placement in settings["where"]}
    if rank == 0:
        report = {"title": f"PyTorch {torch.__version__}", "results": results, "parameters": trainer.parameters}
        print(json.dumps(report), flush=True)
    torch.distributed.destroy_process_group()


def main() -> None:
    """Start the other processes; this one is rank 0."""
    settings = json.loads(sys.argv[1])
    run_processes(run_rank, settings["n"], settings)


if __name__ == "__main__":
    main()
