"""JAX's side of `benchmarks.gpu_step` and `gpu_resnet`: a training step under ``jit`` over a mesh of devices.

The batch is split over the mesh, and the parameters are replicated.  The MLP is written in JAX; the ResNet is in flax,
and its batch normalization uses each device's own images, as Synkhronos and PyTorch do.

A script of its own, which uses the GPUs alone.  Its only argument is the settings as JSON; it prints the results as
JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from benchmarks._measure import HostProbe
from benchmarks._training import measure_steps
from benchmarks.gpu_step import LAYERS, ROWS, generate_batches, time_steps

RATE, MOMENTUM, DECAY = 0.01, 0.9, 1e-4


def make_shardings(n_devices: int) -> tuple[Mesh, NamedSharding, NamedSharding]:
    """Return a mesh of the first ``n_devices`` devices, and the shardings of split and of replicated arrays."""
    mesh = Mesh(np.array(jax.devices()[:n_devices]), ("ranks",))
    return mesh, NamedSharding(mesh, PartitionSpec("ranks")), NamedSharding(mesh, PartitionSpec())


# -- the MLP of gpu_step -----------------------------------------------------------------------------------------


def compute_mlp_loss(params: Sequence[Any], x: Any, y: Any) -> Any:
    """Return the mean cross-entropy of the MLP of `benchmarks.gpu_step`."""
    for w, b in params[:-1]:
        x = jnp.maximum(x @ w + b, 0)
    w, b = params[-1]
    log_p = jax.nn.log_softmax(x @ w + b)
    return -jnp.take_along_axis(log_p, y[:, None], 1).mean()


def update_mlp(params: Any, velocities: Any, x: Any, y: Any) -> tuple[Any, Any, Any]:
    """Take a step of Nesterov's momentum; return parameters, velocities and the loss before the step."""
    loss, gradient = jax.value_and_grad(compute_mlp_loss)(params, x, y)
    velocities = jax.tree.map(lambda v, g: MOMENTUM * v - RATE * g, velocities, gradient)
    params = jax.tree.map(lambda p, v, g: p + MOMENTUM * v - RATE * g, params, velocities, gradient)
    return params, velocities, loss


def measure_mlp(settings: dict[str, Any]) -> dict[str, Any]:
    """Measure a step with rows from the host, and with rows on the devices.

    Returns
    -------
    dict
        Seconds of a step in each round, for each placement of the rows and batch size.
    """
    n, rng = settings["n"], np.random.default_rng(1)
    split: Any
    whole: Any
    _, split, whole = make_shardings(n)
    if n == 1:
        split = whole = SingleDeviceSharding(jax.devices()[0])
    images = rng.random((ROWS, LAYERS[0]), dtype=np.float32)
    labels = rng.integers(0, LAYERS[-1], ROWS).astype("int32")
    # Axis 0 is split over the devices: each device selects from its own rows.
    device_arrays = [jax.device_put(a.reshape(n, ROWS // n, *a.shape[1:]), split) for a in (images, labels)]
    shapes = zip(LAYERS, LAYERS[1:], strict=False)
    init = [
        (rng.standard_normal((a, b), np.float32) / np.float32(np.sqrt(a)), np.zeros(b, np.float32)) for a, b in shapes
    ]
    step = jax.jit(update_mlp, donate_argnums=(0, 1))

    @partial(jax.jit, donate_argnums=(0, 1))
    def step_on_devices(params: Any, velocities: Any, images: Any, labels: Any, rows: Any) -> Any:
        x, y = images[:, rows], labels[:, rows]
        return update_mlp(params, velocities, x.reshape(-1, x.shape[-1]), y.reshape(-1))

    times: dict[str, dict[str, list[float]]] = {"host": {}, "GPU": {}}
    probe = HostProbe()
    for placement in times:
        params = jax.device_put(init, whole)
        velocities = jax.tree.map(jnp.zeros_like, params)

        def take_step(batches: list[np.ndarray], placement: str = placement) -> Any:
            nonlocal params, velocities
            (rows,) = batches
            if placement == "host":
                arrays = [jax.device_put(a[rows], split) for a in (images, labels)]
                params, velocities, loss = step(params, velocities, *arrays)
            else:
                params, velocities, loss = step_on_devices(params, velocities, *device_arrays, rows)
            return loss

        for size in settings["batches"]:
            rows, rows_per_batch = (ROWS, size) if placement == "host" else (ROWS // n, size // n)
            times[placement][str(size)], _ = time_steps(
                take_step, generate_batches(rng, rows, rows_per_batch), settings["calls"], 1, probe
            )
    return {"title": f"JAX {jax.__version__}, {probe.describe()}", "results": times}


# -- the ResNet of gpu_resnet ------------------------------------------------------------------------------------


def make_resnet(settings: dict[str, Any]) -> Any:
    """Return a ResNet with bottleneck blocks, whose strides are in the 3x3 convolutions, as torchvision's."""
    from flax import linen as nn

    dtype = jnp.bfloat16 if settings["precision"] == "bfloat16" else jnp.float32

    class ResNet(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            conv = partial(nn.Conv, use_bias=False, dtype=dtype)
            norm = partial(nn.BatchNorm, use_running_average=False, momentum=0.9, dtype=dtype)
            x = conv(settings["width"], (7, 7), (2, 2), padding=[(3, 3), (3, 3)])(x)
            x = nn.max_pool(nn.relu(norm()(x)), (3, 3), (2, 2), padding=[(1, 1), (1, 1)])
            for stage, n_blocks in enumerate(settings["blocks"]):
                width = settings["width"] * 2**stage
                for block in range(n_blocks):
                    strides = (2, 2) if stage and not block else (1, 1)
                    y = nn.relu(norm()(conv(width, (1, 1))(x)))
                    y = nn.relu(norm()(conv(width, (3, 3), strides, padding=[(1, 1), (1, 1)])(y)))
                    y = norm(scale_init=nn.initializers.zeros)(conv(4 * width, (1, 1))(y))
                    if x.shape != y.shape:
                        x = norm()(conv(4 * width, (1, 1), strides)(x))
                    x = nn.relu(x + y)
            return nn.Dense(settings["classes"], dtype=dtype)(x.mean(axis=(1, 2)))

    return ResNet()


def make_resnet_step(settings: dict[str, Any], mesh: Mesh, split: Any, whole: Any) -> tuple[Callable[..., Any], int]:
    """Return a function of images and labels that takes a step and returns the loss, and the number of parameters."""
    model, size = make_resnet(settings), settings["size"]
    variables = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, size, size, 3)))
    params, averages = jax.device_put((variables["params"], variables["batch_stats"]), whole)
    velocities = jax.tree.map(jnp.zeros_like, params)

    def update(params: Any, averages: Any, velocities: Any, images: Any, labels: Any) -> Any:
        x = (images.astype(jnp.float32) - 127.5) / 64

        def compute_loss(params: Any) -> Any:
            scores, new = model.apply({"params": params, "batch_stats": averages}, x, mutable=["batch_stats"])
            log_p = jax.nn.log_softmax(scores.astype(jnp.float32))
            return -jnp.take_along_axis(log_p, labels[:, None], 1).mean(), new["batch_stats"]

        (loss, new_averages), gradient = jax.value_and_grad(compute_loss, has_aux=True)(params)
        gradient, new_averages, loss = jax.lax.pmean((gradient, new_averages, loss), "ranks")
        velocities = jax.tree.map(lambda v, g, p: MOMENTUM * v + g + DECAY * p, velocities, gradient, params)
        return jax.tree.map(lambda p, v: p - RATE * v, params, velocities), new_averages, velocities, loss

    specs = [sharding.spec for sharding in (whole, whole, whole, split, split)]
    mapped = jax.shard_map(update, mesh=mesh, in_specs=tuple(specs), out_specs=whole.spec, check_vma=False)
    step = jax.jit(mapped, donate_argnums=(0, 1, 2))

    def take_step(images: Any, labels: Any) -> Any:
        nonlocal params, averages, velocities
        params, averages, velocities, loss = step(params, averages, velocities, images, labels)
        return loss

    return take_step, sum(param.size for param in jax.tree.leaves(params))


def measure_resnet(settings: dict[str, Any]) -> dict[str, Any]:
    """Measure a step on batches prepared in host memory, and on a batch that stays on the devices.

    Returns
    -------
    dict
        ``title``, ``parameters``, and ``results``: those of `measure_steps` for each placement of the images.
    """
    n, size, rng = settings["n"], settings["size"], np.random.default_rng(0)
    mesh, split, whole = make_shardings(n)
    rows, results = n * settings["batch_size"], {}
    batches = [
        (
            rng.integers(256, size=(rows, size, size, 3), dtype=np.uint8),
            rng.integers(settings["classes"], size=rows, dtype=np.int32),
        )
        for _ in range(4)
    ]
    device_arrays = jax.device_put(batches[0], split)
    count = 0
    for placement in settings["where"]:
        take_step, count = make_resnet_step(settings, mesh, split, whole)
        turn = 0

        def step(take_step: Any = take_step, placement: str = placement) -> Any:
            nonlocal turn
            turn += 1
            return take_step(
                *(device_arrays if placement == "gpu" else jax.device_put(batches[turn % len(batches)], split))
            )

        results[placement] = measure_steps(step, settings)
    import flax

    title = f"flax {flax.__version__}, JAX {jax.__version__}"
    return {"title": title, "results": results, "parameters": count}


def main() -> None:
    """Measure, and print the result as JSON."""
    settings = json.loads(sys.argv[1])
    print(json.dumps(measure_resnet(settings) if "blocks" in settings else measure_mlp(settings)), flush=True)


if __name__ == "__main__":
    main()
