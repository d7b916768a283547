"""
Truncated quantile critics (Kuznetsov et al. 2020) written again in float64, number by number, gradients by hand.

It shares no code with the package and is slow and plain on purpose: the package has to equal it.
"""

import numpy as np

from tests.reference.td3_by_the_paper import PaperTD3


def kept_quantiles(outputs, drop):
    """Per transition: the quantiles of all critics in ascending order, without the ``drop`` largest per critic."""
    rows = []
    for transition in range(len(outputs[0])):
        pool = sorted(float(value) for output in outputs for value in output[transition])
        rows.append(pool[: len(pool) - drop * len(outputs)])
    return np.array(rows)


def quantile_huber(quantiles, targets):
    """One critic's loss, the mean over transitions and pairs, and its gradient by every quantile."""
    batch, n = quantiles.shape
    m = targets.shape[1]
    loss, gradient = 0.0, np.zeros_like(quantiles)
    for row in range(batch):
        for i in range(n):
            share = (2 * i + 1) / (2 * n)
            for j in range(m):
                error = targets[row, j] - quantiles[row, i]
                weight = 1.0 - share if error < 0 else share
                if abs(error) <= 1.0:
                    loss += weight * error**2 / 2.0
                    gradient[row, i] -= weight * error
                else:
                    loss += weight * (abs(error) - 0.5)
                    gradient[row, i] -= weight * np.sign(error)
    return loss / (batch * n * m), gradient / (batch * n * m)


class PaperQuantileTD3(PaperTD3):
    """
    :param drop: of the pooled target quantiles, how many of the largest are left out for each critic
    """

    def __init__(self, *args, drop, **kwargs):
        super().__init__(*args, **kwargs)
        self.drop = drop

    def next_values(self, outputs):
        return kept_quantiles(outputs, self.drop)

    def loss(self, values, targets):
        loss, gradient = quantile_huber(values, targets)
        return loss / len(self.critics), gradient / len(self.critics)

    def ascended(self):
        return self.critics
