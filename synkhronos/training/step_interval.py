"""Choice of the number of steps between two actions that should take place about once in a given time."""


def adapt_steps(steps: int, seconds: float, interval: float) -> int:
    """Return the number of steps until the next action, at most twice as many as before.

    Parameters
    ----------
    steps : int
        Present number of steps between two actions.
    seconds : float
        Duration of these steps.
    interval : float
        Seconds that should lie between two actions.

    Examples
    --------
    >>> adapt_steps(10, 2.0, 1.0), adapt_steps(10, 0.1, 1.0)
    (5, 20)
    """
    return max(1, min(2 * steps, int(steps * interval / max(seconds, 1e-9))))
