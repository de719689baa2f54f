"""A restricted Boltzmann machine by contrastive divergence, and by persistent contrastive divergence.

The Gibbs chain is a scan.  For the losses it takes its uniform numbers from sequences; then the trained machine draws
by streams, whose updates come out of the scan.
"""

import numpy as np
import theano
import theano.tensor as T
from theano.tensor.shared_randomstreams import RandomStreams

from programs import make_shared_images

ROWS, BATCH, SIDE, HIDDEN, K = 60, 20, 5, 10, 3


class RBM:
    def __init__(self, input, n_visible, n_hidden, W=None, hbias=None, numpy_rng=None):
        if numpy_rng is None:
            numpy_rng = np.random.RandomState(1234)
        if W is None:
            bound = 4 * np.sqrt(6.0 / (n_hidden + n_visible))
            values = numpy_rng.uniform(low=-bound, high=bound, size=(n_visible, n_hidden))
            W = theano.shared(value=np.asarray(values, dtype=theano.config.floatX), name="W", borrow=True)
        if hbias is None:
            hbias = theano.shared(np.zeros(n_hidden, dtype=theano.config.floatX), name="hbias", borrow=True)
        vbias = theano.shared(np.zeros(n_visible, dtype=theano.config.floatX), name="vbias", borrow=True)
        self.input = input
        if not input:
            self.input = T.matrix("input")
        self.n_visible, self.n_hidden = n_visible, n_hidden
        self.W, self.hbias, self.vbias = W, hbias, vbias
        self.params = [self.W, self.hbias, self.vbias]

    def free_energy(self, v_sample):
        wx_b = T.dot(v_sample, self.W) + self.hbias
        return -T.sum(T.log(1 + T.exp(wx_b)), axis=1) - T.dot(v_sample, self.vbias)

    def propup(self, vis):
        pre_sigmoid = T.dot(vis, self.W) + self.hbias
        return [pre_sigmoid, T.nnet.sigmoid(pre_sigmoid)]

    def propdown(self, hid):
        pre_sigmoid = T.dot(hid, self.W.T) + self.vbias
        return [pre_sigmoid, T.nnet.sigmoid(pre_sigmoid)]

    def sample_h_given_v(self, v0_sample, uniform):
        pre_sigmoid, mean = self.propup(v0_sample)
        return [pre_sigmoid, mean, T.cast(uniform < mean, theano.config.floatX)]

    def sample_v_given_h(self, h0_sample, uniform):
        pre_sigmoid, mean = self.propdown(h0_sample)
        return [pre_sigmoid, mean, T.cast(uniform < mean, theano.config.floatX)]

    def gibbs_hvh(self, v_uniform, h_uniform, h0_sample):
        visible = self.sample_v_given_h(h0_sample, v_uniform)
        return visible + self.sample_h_given_v(visible[-1], h_uniform)

    def get_cost_updates(self, noise, lr=0.1, persistent=None, k=1):
        """``noise`` has uniform numbers: a matrix for the first hidden units, and one for each step and layer."""
        first, visible, hidden = noise
        _, _, ph_sample = self.sample_h_given_v(self.input, first)
        chain_start = ph_sample if persistent is None else persistent
        [pre_sigmoid_nvs, _, nv_samples, _, _, nh_samples], updates = theano.scan(
            self.gibbs_hvh,
            sequences=[visible, hidden],
            outputs_info=[None, None, None, None, None, chain_start],
            n_steps=k,
            name="gibbs_hvh",
        )
        chain_end = nv_samples[-1]
        cost = T.mean(self.free_energy(self.input)) - T.mean(self.free_energy(chain_end))
        # The chain's end is where the energy is to rise; there is no gradient through the chain.
        gparams = T.grad(cost, self.params, consider_constant=[chain_end])
        for gparam, param in zip(gparams, self.params, strict=True):
            updates[param] = param - gparam * T.cast(lr, dtype=theano.config.floatX)
        if persistent is not None:
            updates[persistent] = nh_samples[-1]
            return self.pseudo_likelihood(updates), updates
        return self.reconstruction_cost(pre_sigmoid_nvs[-1]), updates

    def pseudo_likelihood(self, updates):
        """Return the likelihood of one pixel given the others; each call takes the next pixel."""
        bit_i_idx = theano.shared(value=0, name="bit_i_idx")
        xi = T.round(self.input)
        fe_xi = self.free_energy(xi)
        xi_flip = T.set_subtensor(xi[:, bit_i_idx], 1 - xi[:, bit_i_idx])
        cost = T.mean(self.n_visible * T.log(T.nnet.sigmoid(self.free_energy(xi_flip) - fe_xi)))
        updates[bit_i_idx] = (bit_i_idx + 1) % self.n_visible
        return cost

    def reconstruction_cost(self, pre_sigmoid_nv):
        likely = T.nnet.sigmoid(pre_sigmoid_nv)
        return T.mean(T.sum(self.input * T.log(likely) + (1 - self.input) * T.log(1 - likely), axis=1))


def draw_noise(steps, n_visible, n_hidden, k):
    """Return uniform numbers for each step."""
    rng = np.random.RandomState(7)
    shapes = [(BATCH, n_hidden), (k, BATCH, n_visible), (k, BATCH, n_hidden)]
    return [[rng.uniform(size=shape).astype(theano.config.floatX) for shape in shapes] for _ in range(steps)]


def draw(rbm, persistent_value):
    """Draw from the machine by streams, in a scan whose updates are theirs."""
    theano_rng = RandomStreams(1)
    chain = theano.shared(persistent_value, name="chain")

    def step(v0_sample):
        _, h_mean = rbm.propup(v0_sample)
        h_sample = theano_rng.binomial(size=h_mean.shape, n=1, p=h_mean, dtype=theano.config.floatX)
        _, v_mean = rbm.propdown(h_sample)
        v_sample = theano_rng.binomial(size=v_mean.shape, n=1, p=v_mean, dtype=theano.config.floatX)
        return v_mean, v_sample

    (v_means, v_samples), updates = theano.scan(step, outputs_info=[None, chain], n_steps=4, name="gibbs_vhv")
    updates.update({chain: v_samples[-1]})
    sample = theano.function([], [v_means[-1], v_samples[-1]], updates=updates, name="sample")
    (means, first), (_, second) = sample(), sample()
    assert means.min() >= 0 and means.max() <= 1 and set(np.unique(first)) == {0, 1}
    assert not np.array_equal(first, second)
    np.testing.assert_array_equal(chain.get_value(), second)


def run(steps):
    pixels, _ = make_shared_images(ROWS, SIDE)
    losses = []
    for is_persistent in (False, True):
        index, x = T.lscalar("index"), T.matrix("x")
        first, visible, hidden = T.matrix("first"), T.tensor3("visible"), T.tensor3("hidden")
        rbm = RBM(input=x, n_visible=SIDE * SIDE, n_hidden=HIDDEN)
        chain = theano.shared(np.zeros((BATCH, HIDDEN), dtype=theano.config.floatX), borrow=True)
        cost, updates = rbm.get_cost_updates(
            [first, visible, hidden], lr=0.1, persistent=chain if is_persistent else None, k=K
        )
        train = theano.function(
            [index, first, visible, hidden],
            cost,
            updates=updates,
            givens={x: pixels[index * BATCH : (index + 1) * BATCH]},
            on_unused_input="ignore",  # a persistent chain needs no first hidden units
            name="train",
        )
        for step, noise in enumerate(draw_noise(steps, SIDE * SIDE, HIDDEN, K)):
            losses.append(train(step % (ROWS // BATCH), *noise))
    draw(rbm, np.round(pixels.get_value()[:BATCH]))
    return losses
