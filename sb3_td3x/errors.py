"""The errors that TD3X adds to SB3's. All are ``ValueError``s, which rl-zoo3 turns into pruned trials."""


class NonFiniteError(ValueError):
    """
    A NaN or an infinity came from the environment or arose in an update.

    The replay buffer holds no such value, and no optimiser step was made with it: the weights are those of the last
    good step. ``VecNormalize`` sees what the environment returns before TD3X does: its statistics are spoilt then, and it
    clips an infinite terminal observation to a finite one, which passes.

    :param tensor: what holds the value, for example ``"reward"`` or ``"critic loss"``
    :param when: where in the run it was found, for example ``"environment step 1200"``
    """

    def __init__(self, tensor: str, when: str):
        super().__init__(
            f"{tensor} is not finite at {when}. The weights are those of the last good step. "
            "A NaN from the environment is the environment's to mend (SB3's VecCheckNan finds it); "
            "in a loss or gradient, lower learning_rate or normalise observations and rewards."
        )
        self.tensor = tensor
        self.when = when

    def __reduce__(
        self,
    ) -> tuple[
        type["NonFiniteError"], tuple[str, str]
    ]:  # an exception with its own constructor is pickled by its arguments (SubprocVecEnv, Ray)
        return type(self), (self.tensor, self.when)


class ModelFileError(ValueError):
    """A file is not a model that TD3X can load: damaged, cut off, or saved by another algorithm."""
