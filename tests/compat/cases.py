"""Graphs that Theano and PyTensor build from the same lines, with their inputs.

Cases are reproducible: a case's name seeds its inputs, and one seed determines the list of cases.
"""

import itertools
import zlib
from dataclasses import dataclass

import numpy as np


@dataclass
class Case:
    """A function of some inputs.

    Parameters
    ----------
    name : str
    build : callable
        Takes variables and returns one, or a list.
    inputs : list of array
        Floats have gradients, integers don't.
    has_second_derivatives : bool
        Whether gradients of gradients are compared too.
    has_gradients : bool
    n_differentiated : int, optional
        Number of the first outputs whose gradients are taken; all by default.
    """

    name: str
    build: object
    inputs: list
    has_second_derivatives: bool = False
    has_gradients: bool = True
    n_differentiated: int = None

    def compute(self, mode=None):
        """Return outputs, gradients and second derivatives as this process's ``theano`` computes them."""
        import theano
        import theano.tensor as T

        variables = [T.TensorType(str(v.dtype), (False,) * v.ndim)(f"x{i}") for i, v in enumerate(self.inputs)]
        outputs = self.build(*variables)
        outputs = list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]
        outputs_by_name = {"out": outputs}
        if self.has_gradients:
            rng = np.random.RandomState(1)
            floats = [v for v in variables if v.dtype.startswith("float")]
            grads = T.grad(
                sum_with_weights(outputs[: self.n_differentiated], rng), floats, disconnected_inputs="ignore"
            )
            outputs_by_name["grad"] = grads
            if self.has_second_derivatives:
                outputs_by_name["second"] = T.grad(sum_with_weights(grads, rng), floats, disconnected_inputs="ignore")
        flat = [v for values in outputs_by_name.values() for v in values]
        computed = iter(theano.function(variables, flat, mode=mode, on_unused_input="ignore")(*self.inputs))
        return {kind: [next(computed) for _ in values] for kind, values in outputs_by_name.items()}


def sum_with_weights(outputs, rng):
    """Return a sum of all elements with weights, so that no two gradients are alike by chance."""
    import theano.tensor as T

    total = 0
    for output in outputs:
        if output.dtype.startswith("float"):
            flat = output.flatten()
            total = total + (flat * T.cos(T.arange(flat.shape[0]) * 1.7 + rng.uniform())).sum()
    return total


def make_inputs(name, *shapes, positive=False, classes=None):
    """Return arrays of floats in these shapes, drawn from the name; with ``classes`` integers at the end."""
    rng = np.random.RandomState(zlib.crc32(name.encode()) % 2**31)
    # Multiples of 1/64: exact in float32, and no sum or product of them rounds much.
    values = [rng.randint(-128, 129, size=shape) / 64.0 for shape in shapes]
    if positive:
        values = [np.abs(v) + 0.5 for v in values]
    if classes is not None:
        values.append(rng.randint(0, classes, size=shapes[0][0]).astype("int32"))
    return values


def make_distinct(name, shape):
    """Return an array without equal elements: maxima are of one element each."""
    rng = np.random.RandomState(zlib.crc32(name.encode()) % 2**31)
    return [(rng.permutation(int(np.prod(shape))).reshape(shape) - np.prod(shape) // 2) / 16.0]


def import_nnet():
    import theano.tensor.nnet as nnet

    return nnet


def format_call(function, **kwargs):
    parts = [f"{key}={value}" for key, value in kwargs.items()]
    return f"{function}({', '.join(parts)})".replace("'", "")


# -- convolution -----------------------------------------------------------------------------------------------------

BORDERS = ["valid", "full", "half", 1, (2, 0), ((1, 2), (0, 1))]


def make_conv_cases():
    rng = np.random.RandomState(7)
    choices = list(itertools.product(BORDERS, [(1, 1), (2, 1), (3, 2)], [(1, 1), (1, 2)], [True, False], [1, 2]))
    for index in rng.permutation(len(choices))[:44]:
        border, stride, dilation, flip, groups = choices[index]
        kernel = (int(rng.randint(1, 4)), int(rng.randint(1, 4)))
        image = (int(rng.randint(5, 8)), int(rng.randint(6, 9)))
        options = {"border_mode": border, "subsample": stride, "filter_dilation": dilation, "filter_flip": flip}
        options["num_groups"] = groups
        name = format_call("conv2d", kernel=kernel, image=image, **options)
        shapes = (2, 2 * groups, *image), (2 * groups, 2, *kernel)
        yield Case(
            name,
            lambda x, w, options=options: import_nnet().conv2d(x, w, **options),
            make_inputs(name, *shapes),
            has_second_derivatives=True,
        )


def make_conv_gradient_cases():
    for border, stride in [("valid", (1, 1)), ("half", (2, 2)), ("full", (2, 1)), ((1, 0), (1, 2))]:
        for flip in (True, False):
            options = {"border_mode": border, "subsample": stride, "filter_flip": flip}
            height = 6
            from_shape = compute_conv_output_length((height, 7), (3, 2), border, stride)
            name = format_call("conv2d_grad_wrt_inputs", **options)
            yield Case(
                name,
                lambda g, w, options=options: import_nnet().abstract_conv.conv2d_grad_wrt_inputs(
                    g, w, (2, 3, 6, 7), (2, 3, 3, 2), **options
                ),
                make_inputs(name, (2, 2, *from_shape), (2, 3, 3, 2)),
            )
            name = format_call("conv2d_grad_wrt_weights", **options)
            yield Case(
                name,
                lambda x, g, options=options: import_nnet().abstract_conv.conv2d_grad_wrt_weights(
                    x, g, (2, 3, 3, 2), (2, 3, 6, 7), **options
                ),
                make_inputs(name, (2, 3, 6, 7), (2, 2, *from_shape)),
            )
    name = "conv2d_transpose"
    yield Case(
        name,
        lambda x, w: import_nnet().conv2d_transpose(
            x, w, (2, 3, 9, 9), (4, 3, 3, 3), border_mode=(1, 1), input_dilation=(2, 2)
        ),
        make_inputs(name, (2, 4, 5, 5), (4, 3, 3, 3)),
    )


def compute_conv_output_length(image, kernel, border, stride):
    pads = {"valid": (0, 0), "full": (kernel[0] - 1, kernel[1] - 1), "half": (kernel[0] // 2, kernel[1] // 2)}
    pad = pads[border] if isinstance(border, str) else border
    return tuple((i + 2 * p - k) // s + 1 for i, k, p, s in zip(image, kernel, pad, stride, strict=True))


def make_other_conv_cases():
    for border, stride, flip in [("valid", (1, 1, 1), True), ("half", (2, 1, 2), False), ((1, 0, 1), (1, 2, 1), True)]:
        options = {"border_mode": border, "subsample": stride, "filter_flip": flip}
        name = format_call("conv3d", **options)
        yield Case(
            name,
            lambda x, w, options=options: import_nnet().conv3d(x, w, **options),
            make_inputs(name, (2, 2, 4, 5, 4), (2, 2, 2, 3, 3)),
        )
    for dilation in (1, 2):
        name = format_call("causal_conv1d", dilation=dilation)
        yield Case(
            name,
            lambda x, w, d=dilation: import_nnet().abstract_conv.causal_conv1d(x, w, (2, 3, 3), filter_dilation=d),
            make_inputs(name, (2, 3, 8), (2, 3, 3)),
        )
    name = "separable_conv2d"
    yield Case(
        name,
        lambda x, d, p: import_nnet().separable_conv2d(x, d, p, 3, border_mode="half"),
        make_inputs(name, (2, 3, 5, 5), (6, 1, 3, 3), (2, 6, 1, 1)),
    )
    for ratio in (2, 3):
        name = format_call("bilinear_upsampling", ratio=ratio)
        yield Case(
            name,
            lambda x, r=ratio: import_nnet().abstract_conv.bilinear_upsampling(
                x, r, batch_size=2, num_input_channels=2
            ),
            make_inputs(name, (2, 2, 3, 4)),
        )


# -- pooling ---------------------------------------------------------------------------------------------------------


def make_pool_cases():
    for mode in ("max", "sum", "average_inc_pad", "average_exc_pad"):
        for window, stride, pad, ignore in [
            ((2, 2), None, (0, 0), True),
            ((2, 2), None, (0, 0), False),
            ((3, 2), (2, 1), (0, 0), True),
            ((3, 2), (2, 3), (0, 0), False),
            ((2, 3), (3, 2), (0, 0), False),
            ((3, 3), (2, 2), (1, 1), True),
            ((3, 2), (1, 2), (2, 1), True),
        ]:
            name = format_call("pool_2d", mode=mode, ws=window, stride=stride, pad=pad, ignore_border=ignore)

            def build(x, mode=mode, window=window, stride=stride, pad=pad, ignore=ignore):
                from theano.tensor.signal import pool

                return pool.pool_2d(x, window, ignore, stride=stride, pad=pad, mode=mode)

            # Theano has no gradient of means that exclude the padding.
            grads = not (mode == "average_exc_pad" and any(pad))
            yield Case(
                name, build, make_distinct(name, (2, 1, 7, 6)), has_second_derivatives=grads, has_gradients=grads
            )
        name = format_call("pool_3d", mode=mode)

        def build3(x, mode=mode):
            from theano.tensor.signal import pool

            return pool.pool_3d(x, (2, 2, 3), True, stride=(1, 2, 2), pad=(0, 1, 1), mode=mode)

        yield Case(name, build3, make_distinct(name, (2, 1, 4, 5, 6)), has_gradients=mode != "average_exc_pad")
    name = "pool_2d of equal elements"

    def ties(x):
        from theano.tensor.signal import pool

        return pool.pool_2d((x > 0) * 1.0 + 0 * x, (2, 2), True, stride=(1, 1))

    yield Case(name, ties, make_inputs(name, (1, 2, 4, 5)))
    name = "max_pool_2d_same_size"

    def pool_same_size(x):
        from theano.tensor.signal import pool

        return pool.max_pool_2d_same_size(x, (2, 2))

    yield Case(name, pool_same_size, make_distinct(name, (1, 2, 4, 6)), has_gradients=False)


# -- normalization ---------------------------------------------------------------------------------------------------


def make_batch_norm_cases():
    from itertools import product

    for axes, running in product(["per-activation", "spatial", (0, 2)], [False, True]):
        shape = (3, 2, 4, 3)
        kept_axes = {"per-activation": (1, 2, 3), "spatial": (1,), (0, 2): (1, 3)}[axes]
        layout = tuple(shape[a] for a in kept_axes)
        name = format_call("batch_normalization_train", axes=axes, running=running)

        def build(x, gamma, beta, *old, axes=axes):
            import theano.tensor.nnet.bn as bn

            old = {"running_mean": old[0], "running_var": old[1]} if old else {}
            return bn.batch_normalization_train(x, gamma, beta, axes, 1e-3, 0.2, **old)

        count = 5 if running else 3
        yield Case(name, build, make_inputs(name, shape, *[layout] * (count - 1)), n_differentiated=1)
        name = format_call("batch_normalization_test", axes=axes, running=running)
        if running:

            def build_test(x, gamma, beta, mean, var, axes=axes):
                import theano.tensor.nnet.bn as bn

                return bn.batch_normalization_test(x, gamma, beta, mean, var, axes, 1e-3)

            yield Case(name, build_test, make_inputs(name, shape, *[layout] * 4, positive=True))
    name = "batch_normalization"
    yield Case(
        name,
        lambda x, gamma, beta, mean, std: import_nnet().bn.batch_normalization(
            x, gamma, beta, mean, std, mode="high_mem"
        ),
        make_inputs(name, (4, 3), (4, 3), (4, 3), (4, 3), (4, 3), positive=True),
    )


# -- nonlinearities and losses ---------------------------------------------------------------------------------------


def make_elementwise_cases():
    functions = {
        "sigmoid": lambda x: import_nnet().sigmoid(x),
        "softplus": lambda x: import_nnet().softplus(x * 20),
        "ultra_fast_sigmoid": lambda x: import_nnet().ultra_fast_sigmoid(x * 4),
        "hard_sigmoid": lambda x: import_nnet().hard_sigmoid(x * 2),
        "relu": lambda x: import_nnet().relu(x),
        "leaky relu": lambda x: import_nnet().relu(x, 0.1),
        "elu": lambda x: import_nnet().elu(x, 0.5),
        "selu": lambda x: import_nnet().selu(x),
        "softsign": lambda x: import_nnet().nnet.softsign(x),
        "softmax": lambda x: import_nnet().softmax(x),
        "logsoftmax": lambda x: import_nnet().logsoftmax(x * 10),
        "log of softmax": lambda x: import_tensor().log(import_nnet().softmax(x)),
    }
    for name, function in functions.items():
        # Theano's approximations have no gradients.
        yield Case(name, function, make_inputs(name, (4, 5)), has_gradients=name != "ultra_fast_sigmoid")
    yield Case("softmax of a vector", lambda x: import_nnet().softmax(x), make_inputs("softmax of a vector", (5,)))
    name = "softmax_with_bias"
    yield Case(name, lambda x, b: import_nnet().softmax_with_bias(x, b), make_inputs(name, (4, 5), (5,)))
    name = "prelu"
    yield Case(name, lambda x, a: import_nnet().relu(x, a.dimshuffle("x", 0)), make_inputs(name, (4, 5), (5,)))


def import_tensor():
    import theano.tensor as T

    return T


def make_loss_cases():
    T = import_tensor
    name = "categorical_crossentropy of classes"
    build = lambda x, y: import_nnet().categorical_crossentropy(import_nnet().softmax(x), y)  # noqa: E731
    yield Case(name, build, make_inputs(name, (4, 5), classes=5))
    name = "categorical_crossentropy of probabilities"
    build = lambda x, t: import_nnet().categorical_crossentropy(import_nnet().softmax(x), import_nnet().softmax(t))  # noqa: E731
    yield Case(name, build, make_inputs(name, (4, 5), (4, 5)))
    name = "categorical_crossentropy without softmax"
    build = lambda p, y: import_nnet().categorical_crossentropy(p / p.sum(axis=1, keepdims=True), y)  # noqa: E731
    yield Case(name, build, make_inputs(name, (4, 5), positive=True, classes=5))
    name = "indexed log of softmax"
    build = lambda x, y: -T().log(import_nnet().softmax(x))[T().arange(y.shape[0]), y]  # noqa: E731
    yield Case(name, build, make_inputs(name, (4, 5), classes=5))
    name = "crossentropy_softmax_1hot_with_bias"
    build = lambda x, b, y: import_nnet().crossentropy_softmax_1hot_with_bias(x, b, y)[0]  # noqa: E731
    yield Case(name, build, make_inputs(name, (4, 5), (5,), classes=5))
    name = "binary_crossentropy"
    build = lambda x, t: import_nnet().binary_crossentropy(import_nnet().sigmoid(x), t)  # noqa: E731
    yield Case(name, build, make_inputs(name, (4, 5), (4, 5)))
    name = "sigmoid_binary_crossentropy"
    build = lambda x, t: import_nnet().sigmoid_binary_crossentropy(x, t)  # noqa: E731
    yield Case(name, build, make_inputs(name, (4, 5), (4, 5)))
    name = "h_softmax"
    build = lambda x, w1, b1, w2, b2: import_nnet().h_softmax(x, 4, 6, 2, 3, w1, b1, w2, b2)  # noqa: E731
    yield Case(name, build, make_inputs(name, (4, 3), (3, 2), (2,), (2, 3, 3), (2, 3)))


# -- others ----------------------------------------------------------------------------------------------------------


def make_other_cases():
    for mode, shape, window, step in [
        ("valid", (2, 2, 4, 6), (2, 3), None),
        ("valid", (1, 2, 5, 6), (3, 2), (2, 2)),
        ("ignore_borders", (2, 1, 5, 7), (2, 3), None),
        ("wrap_centered", (1, 2, 4, 5), (3, 3), (1, 1)),
        ("half", (1, 1, 4, 5), (3, 3), (1, 1)),
        ("full", (1, 1, 4, 5), (2, 3), (1, 1)),
    ]:
        name = format_call("images2neibs", mode=mode, shape=shape, neib_shape=window, neib_step=step)

        def build(x, mode=mode, window=window, step=step):
            from theano.tensor.nnet.neighbours import images2neibs

            return images2neibs(x, window, step, mode=mode)

        # Theano has gradients of neighbourhoods side by side only.
        yield Case(name, build, make_inputs(name, shape), has_gradients=step is None)
    for mode, shape in [("valid", (2, 2, 4, 6)), ("ignore_borders", (1, 2, 5, 7))]:
        name = format_call("neibs2images", mode=mode)
        rows = shape[0] * shape[1] * (shape[2] // 2) * (shape[3] // 3)

        def back(x, mode=mode, shape=shape):
            from theano.tensor.nnet.neighbours import neibs2images

            return neibs2images(x, (2, 3), shape, mode=mode)

        yield Case(name, back, make_inputs(name, (rows, 6)), has_gradients=mode == "valid")
    name = "confusion_matrix"
    yield Case(
        name,
        lambda a, p: import_nnet().confusion_matrix(a, p),
        [np.array([2, 0, 2, 2, 0, 1, 4]), np.array([0, 0, 2, 2, 0, 2, 1])],
        has_gradients=False,
    )
    for x_shape, w_shape, border in [
        ((6, 5), (3, 2), "valid"),
        ((2, 6, 5), (3, 2), "full"),
        ((2, 6, 5), (3, 2, 2), "valid"),
    ]:
        name = format_call("signal.conv2d", x=x_shape, w=w_shape, border=border)

        def signal(x, w, border=border):
            from theano.tensor.signal import conv

            return conv.conv2d(x, w, border_mode=border)

        yield Case(name, signal, make_inputs(name, x_shape, w_shape))
    yield from make_tensor_cases()


def make_tensor_cases():
    T = import_tensor
    table = {
        "batched_dot 33": (lambda a, b: T().batched_dot(a, b), (2, 3, 4), (2, 4, 5)),
        "batched_dot 23": (lambda a, b: T().batched_dot(a, b), (2, 4), (2, 4, 5)),
        "batched_dot 32": (lambda a, b: T().batched_dot(a, b), (2, 3, 4), (2, 4)),
        "batched_dot 22": (lambda a, b: T().batched_dot(a, b), (2, 4), (2, 4)),
        "batched_dot 43": (lambda a, b: T().batched_dot(a, b), (2, 3, 2, 4), (2, 4, 5)),
        "batched_tensordot": (lambda a, b: T().batched_tensordot(a, b, [[1, 2], [2, 1]]), (2, 3, 4), (2, 4, 3)),
        "tensordot": (lambda a, b: T().tensordot(a, b, [[1, 2], [1, 0]]), (2, 3, 4), (4, 3, 5)),
        "dot of 3 and 2": (lambda a, b: T().dot(a, b), (2, 3, 4), (4, 5)),
        "stack": (lambda a, b: T().stack(a, b), (2, 3), (2, 3)),
        "stack in a list": (lambda a, b: T().stack([a, b], axis=1), (2, 3), (2, 3)),
        "concatenate": (lambda a, b: T().concatenate([a, b], axis=1), (2, 3), (2, 4)),
        "flatten": (lambda a: T().flatten(a, outdim=2), (2, 3, 4)),
        "tile": (lambda a: T().tile(a, (2, 3)), (2, 3)),
        "repeat": (lambda a: T().repeat(a, 2, axis=1), (2, 3)),
        "inv, sqr, sgn, abs_": (lambda a: [T().inv(a + 9), T().sqr(a), T().sgn(a), T().abs_(a)], (3, 4)),
        "var and std": (lambda a: [a.var(axis=1), T().std(a, axis=0, keepdims=True)], (3, 4)),
        "norm": (lambda a: [a.norm(2), a.norm(1, axis=1)], (3, 4)),
        "max and argmax": (lambda a: list(T().max_and_argmax(a, axis=1)), (3, 7)),
        "clip": (lambda a: T().clip(a, -0.5, 1.0), (3, 4)),
        "switch": (lambda a, b: T().switch(T().gt(a, b), a, 2 * b), (3, 4), (3, 4)),
        "set_subtensor": (lambda a, b: T().set_subtensor(a[1:3, ::2], b), (4, 4), (2, 2)),
        "inc_subtensor": (lambda a, b: T().inc_subtensor(a[T().constant([1, 1, 0])], b), (4, 4), (3, 4)),
        "diag and tri": (lambda a: [T().diag(a), T().triu(a), T().nlinalg.extract_diag(a)], (4, 4)),
        "sort": (lambda a: T().sort(a, axis=1), (3, 5)),
        "cumsum and cumprod": (lambda a: [T().cumsum(a, axis=1), T().cumprod(a, axis=0)], (3, 4)),
        "outer": (lambda a, b: T().outer(a, b), (3,), (4,)),
        "shape_padright": (lambda a, b: T().shape_padright(a) * b, (3,), (3, 4)),
        "addbroadcast": (lambda a, b: T().addbroadcast(a, 1) * b, (3, 1), (3, 4)),
        "extra_ops.diff": (lambda a: T().extra_ops.diff(a), (5,)),
        "nlinalg.det": (lambda a: T().nlinalg.det(a), (3, 3)),
        "nlinalg.matrix_inverse": (lambda a: T().nlinalg.matrix_inverse(a + 9 * T().eye(3)), (3, 3)),
    }
    for name, (build, *shapes) in table.items():
        yield Case(name, build, make_inputs(name, *shapes))
    name = "grad_clip"

    def clipped(x):
        import theano

        return theano.gradient.grad_clip(x, -0.1, 0.1) ** 2

    yield Case(name, clipped, make_inputs(name, (3, 4)))


CASES = [
    *make_conv_cases(),
    *make_conv_gradient_cases(),
    *make_other_conv_cases(),
    *make_pool_cases(),
    *make_batch_norm_cases(),
    *make_elementwise_cases(),
    *make_loss_cases(),
    *make_other_cases(),
]
