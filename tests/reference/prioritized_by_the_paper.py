"""
LAP (Fujimoto, Meger and Precup 2020, https://arxiv.org/abs/2007.06049) again in float64, transition by transition.

It shares no code with the package and is slow and plain on purpose: the package has to equal it.
"""

import numpy as np

from tests.reference.td3_by_the_paper import PaperTD3

ALPHA = 0.4


def priority(error):
    return max(abs(error) ** ALPHA, 1.0)


def largest_errors(outputs, targets):
    """Per transition: the largest distance over the critics between the means of their outputs and of the targets."""
    return [max(abs(np.mean(output[row]) - np.mean(targets[row])) for output in outputs) for row in range(len(targets))]


def huber(error):
    """Loss and slope."""
    return (error**2 / 2.0, error) if abs(error) <= 1.0 else (abs(error) - 0.5, np.sign(error))


class PaperLAPTD3(PaperTD3):
    """Huber loss on the transitions of a batch that LAP has drawn."""

    def loss(self, values, targets):
        pairs = [huber(value - target) for value, target in zip(values[:, 0], targets[:, 0], strict=True)]
        return np.mean([loss for loss, _ in pairs]), np.array([[slope] for _, slope in pairs]) / len(pairs)
