"""
The interquartile mean over environments and seeds with rliable (Agarwal et al. 2021, https://arxiv.org/abs/2108.13264).

It is the mean of the middle half of all runs' scores; the interval comes from a bootstrap stratified by environment.
"""

from collections.abc import Sequence
from importlib.util import find_spec

import numpy as np

RESAMPLES = 1000


def require_rliable() -> None:
    """
    :raises ValueError: with what to install, if rliable is not
    """
    if find_spec("rliable") is None:
        raise ValueError(
            "the interquartile mean over several environments needs rliable: pip install rliable (or leave it out: --no-iqm)"
        )


def interquartile_mean(scores: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """
    :param scores: ``(seeds, environments, points)``
    :return: interquartile mean, and lower and upper edge of its 95 % interval, each ``(points,)``
    """
    require_rliable()
    from rliable import library
    from scipy.stats import trim_mean

    def aggregate(values: np.ndarray) -> np.ndarray:
        # rliable's `aggregate_iqm` of every point at once: one by one takes half a minute for four environments
        return trim_mean(values.reshape(-1, values.shape[-1]), proportiontocut=0.25, axis=0)

    before = np.random.get_state()
    np.random.seed(0)  # rliable draws from the global generator
    try:
        means, intervals = library.get_interval_estimates({"": scores}, aggregate, reps=RESAMPLES)
    finally:
        np.random.set_state(before)
    return means[""], *intervals[""]


def normalized(values: np.ndarray, drawn: Sequence[np.ndarray]) -> np.ndarray:
    """
    Scores of one environment on a scale that environments share.

    :param values: to put on it
    :param drawn: all scores of this environment that are drawn: their lowest is 0 and their highest 1
    """
    every = np.concatenate(list(drawn))
    return (values - every.min()) / max(float(np.ptp(every)), 1e-12)
