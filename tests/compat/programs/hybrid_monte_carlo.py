"""Hybrid Monte Carlo on a Gaussian: leapfrog steps in a scan with a gradient in it, and a step size that adapts."""

import numpy as np
import theano
import theano.tensor as T

BATCH, DIM, LEAPFROG = 6, 4, 8


def kinetic_energy(vel):
    return 0.5 * (vel**2).sum(axis=1)


def hamiltonian(pos, vel, energy_fn):
    return energy_fn(pos) + kinetic_energy(vel)


def simulate_dynamics(initial_pos, initial_vel, stepsize, n_steps, energy_fn):
    def leapfrog(pos, vel, step):
        dE_dpos = T.grad(energy_fn(pos).sum(), pos)
        new_vel = vel - step * dE_dpos
        return [pos + step * new_vel, new_vel], {}

    initial_energy = energy_fn(initial_pos)
    vel_half_step = initial_vel - 0.5 * stepsize * T.grad(initial_energy.sum(), initial_pos)
    pos_full_step = initial_pos + stepsize * vel_half_step
    (all_pos, all_vel), scan_updates = theano.scan(
        leapfrog,
        outputs_info=[{"initial": pos_full_step}, {"initial": vel_half_step}],
        non_sequences=[stepsize],
        n_steps=n_steps - 1,
    )
    assert not scan_updates
    final_pos, final_vel = all_pos[-1], all_vel[-1]
    energy = energy_fn(final_pos)
    final_vel = final_vel - 0.5 * stepsize * T.grad(energy.sum(), final_pos)
    return final_pos, final_vel


def hmc_move(positions, initial_vel, uniform, energy_fn, stepsize, n_steps):
    final_pos, final_vel = simulate_dynamics(positions, initial_vel, stepsize, n_steps, energy_fn)
    energy_prev = hamiltonian(positions, initial_vel, energy_fn)
    energy_next = hamiltonian(final_pos, final_vel, energy_fn)
    accept = T.exp(energy_prev - energy_next) - uniform >= 0
    return accept, final_pos, T.mean(energy_next - energy_prev)


def hmc_updates(positions, stepsize, avg_acceptance_rate, final_pos, accept):
    # A variable that has as many dimensions as the positions, for one decision a row.
    accept_matrix = accept.dimshuffle(0, *(("x",) * (final_pos.ndim - 1)))
    new_positions = T.switch(accept_matrix, final_pos, positions)
    adapted_stepsize = T.switch(avg_acceptance_rate > 0.9, stepsize * 1.02, stepsize * 0.98)
    new_stepsize = T.clip(adapted_stepsize, 0.01, 0.5)
    new_rate = T.add(0.9 * avg_acceptance_rate, (1.0 - 0.9) * accept.mean(dtype=theano.config.floatX))
    return [(positions, new_positions), (stepsize, new_stepsize), (avg_acceptance_rate, new_rate)]


def sharedX(X, name):
    return theano.shared(np.asarray(X, dtype=theano.config.floatX), name=name)


def run(steps):
    rng = np.random.RandomState(12345)
    mu = sharedX(rng.rand(DIM) * 4, "mu")
    cov = np.array(rng.rand(DIM, DIM), dtype=theano.config.floatX)
    cov = (cov + cov.T) / 2.0
    cov[np.arange(DIM), np.arange(DIM)] = 1.0
    cov_inv = sharedX(np.linalg.inv(cov @ cov.T + 0.5 * np.eye(DIM)), "cov_inv")

    def gaussian_energy(x):
        return 0.5 * (T.dot((x - mu), cov_inv) * (x - mu)).sum(axis=1)

    positions = sharedX(rng.randn(BATCH, DIM), "positions")
    stepsize, rate = sharedX(0.1, "stepsize"), sharedX(0.9, "avg_acceptance_rate")
    velocity, uniform = T.matrix("velocity"), T.vector("uniform")
    accept, final_pos, error = hmc_move(positions, velocity, uniform, gaussian_energy, stepsize, LEAPFROG)
    simulate = theano.function(
        [velocity, uniform],
        [gaussian_energy(positions).mean(), error],
        updates=hmc_updates(positions, stepsize, rate, final_pos, accept),
    )
    losses = []
    for _ in range(steps):
        draws = rng.normal(size=(BATCH, DIM)), rng.uniform(size=BATCH)
        losses.extend(simulate(*(d.astype(theano.config.floatX) for d in draws)))
        losses.append(float(stepsize.get_value()))
    return losses + list(positions.get_value().ravel())
