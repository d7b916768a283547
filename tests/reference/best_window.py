"""Which actor a run would return, found the slow way from a list of its episodes."""


def best_window(episodes, window):
    """
    :param episodes: ``(return, what the actor was at its end)`` of each, in the order in which they ended
    :return: the highest mean return of ``window`` episodes in a row, counted from the first, and the actor in the middle
    """
    found = (float("-inf"), None)
    for first in range(0, len(episodes) - window + 1, window):
        one = episodes[first : first + window]
        mean = sum(value for value, _ in one) / window
        if mean >= found[0]:
            found = mean, one[(window - 1) // 2][1]
    return found
