"""Programs as they were written for Theano: each module trains a model of its own, by the idioms of its time.

Each has a function ``run(steps)`` that returns the losses of the first steps.  They import ``theano``, and run unchanged
on Theano 1.0.5 and on PyTensor.  Random numbers come from NumPy, since the streams of the two libraries give other
numbers for the same seed; a program that also draws by streams checks those numbers itself.
"""

import numpy as np
import theano

#: In the order of the table in docs/from_theano.rst.
NAMES = (
    "logistic_regression",
    "conjugate_gradients",
    "perceptron",
    "convolution",
    "autoencoder",
    "stacked_autoencoders",
    "boltzmann",
    "belief_net",
    "hybrid_monte_carlo",
    "lstm",
    "recurrent",
    "unet",
    "densenet",
    "googlenet",
    "vgg",
)

#: Arguments of ``run`` for smaller networks, with all kinds of layers of the larger one, which compile in less time.
SMALLER = {
    "densenet": {"layers": 1},
    "googlenet": {"modules": (2,)},
    "unet": {"depths": 1},
    "vgg": {"blocks": ((1, 2), (2, 3))},
}

#: Number of steps that are compared.
STEPS = 3


def make_images(n, side, channels=1, classes=4, seed=1):
    """Return images with pixels between 0 and 1, as an array (n, channels, side, side), and their classes."""
    rng = np.random.RandomState(seed)
    patterns = rng.uniform(size=(classes, channels, side, side))
    labels = rng.randint(classes, size=n)
    noise = rng.uniform(size=(n, channels, side, side))
    return (0.6 * patterns[labels] + 0.4 * noise).astype(theano.config.floatX), labels.astype("int32")


def make_shared_images(n, side, **kwargs):
    """Return the result of `make_images` as shared variables, each a row, and their classes cast to integers."""
    pixels, labels = make_images(n, side, **kwargs)
    rows = theano.shared(pixels.reshape(n, -1), name="pixels", borrow=True)
    # On GPUs of Theano's time only floats could be kept.
    classes = theano.shared(labels.astype(theano.config.floatX), name="labels", borrow=True)
    return rows, theano.tensor.cast(classes, "int32")
