"""A denoising autoencoder with tied weights."""

import numpy as np
import theano
import theano.tensor as T
from theano.tensor.shared_randomstreams import RandomStreams

from programs import make_shared_images

ROWS, BATCH, SIDE, HIDDEN = 60, 20, 6, 12


class DenoisingAutoencoder:
    """``corrupt`` says which pixels are put to zero, by a variable of the input's shape with numbers from 0 to 1."""

    def __init__(self, rng, input, noise, n_visible, n_hidden, W=None, bhid=None, bvis=None):
        if W is None:
            bound = 4 * np.sqrt(6.0 / (n_hidden + n_visible))
            values = rng.uniform(low=-bound, high=bound, size=(n_visible, n_hidden))
            W = theano.shared(value=np.asarray(values, dtype=theano.config.floatX), name="W", borrow=True)
        if bvis is None:
            bvis = theano.shared(value=np.zeros(n_visible, dtype=theano.config.floatX), borrow=True)
        if bhid is None:
            bhid = theano.shared(value=np.zeros(n_hidden, dtype=theano.config.floatX), name="b", borrow=True)
        self.W, self.b, self.b_prime = W, bhid, bvis
        self.W_prime = self.W.T
        self.x, self.noise = input, noise
        self.params = [self.W, self.b, self.b_prime]

    def get_cost_updates(self, corruption_level, learning_rate):
        tilde_x = T.ge(self.noise, corruption_level) * self.x
        y = T.nnet.sigmoid(T.dot(tilde_x, self.W) + self.b)
        z = T.nnet.sigmoid(T.dot(y, self.W_prime) + self.b_prime)
        L = -T.sum(self.x * T.log(z) + (1 - self.x) * T.log(1 - z), axis=1)
        cost = T.mean(L)
        gparams = T.grad(cost, self.params)
        return cost, [(p, p - learning_rate * g) for p, g in zip(self.params, gparams, strict=True)]


def make_shared_noise(rows, columns):
    noise = np.random.RandomState(99).uniform(size=(rows, columns))
    return theano.shared(noise.astype(theano.config.floatX), name="noise", borrow=True)


def run(steps):
    pixels, _ = make_shared_images(ROWS, SIDE)
    index, x, noise = T.lscalar("index"), T.matrix("x"), T.matrix("noise")
    rows = slice(index * BATCH, (index + 1) * BATCH)

    # Whole batches are corrupted by streams; how, is the library's.
    theano_rng = RandomStreams(np.random.RandomState(123).randint(2**30))
    mask = theano_rng.binomial(size=x.shape, n=1, p=1 - 0.3, dtype=theano.config.floatX)
    corrupt = theano.function([index], [x, mask * x], givens={x: pixels[rows]})
    whole, corrupted = corrupt(0)
    assert np.all((corrupted == 0) | (corrupted == whole)) and 0.6 < np.mean(corrupted == whole) < 0.8
    assert not np.array_equal(corrupt(0)[1], corrupted)

    model = DenoisingAutoencoder(np.random.RandomState(123), x, noise, SIDE * SIDE, HIDDEN)
    cost, updates = model.get_cost_updates(corruption_level=0.3, learning_rate=0.1)
    givens = {x: pixels[rows], noise: make_shared_noise(ROWS, SIDE * SIDE)[rows]}
    train = theano.function([index], cost, updates=updates, givens=givens)
    return [train(step % (ROWS // BATCH)) for step in range(steps)]
