"""What a user may set: types and ranges; exploration's settings are checked in ``exploration.py``."""

import difflib
import math
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

WHOLE_WITH_MINIMUM = {
    "buffer_size": 1,
    "batch_size": 1,
    "gradient_steps": -1,  # -1: as many updates as environment steps since the last training
    "n_steps": 1,
    "policy_delay": 1,
    "n_quantiles": 1,
    "top_quantiles_to_drop_per_net": 0,
}
BETWEEN_0_AND_1 = ("tau", "gamma")
NOT_NEGATIVE = ("target_policy_noise", "target_noise_clip")
AUTO = "auto"
MAY_BE_AUTO = ("n_quantiles",)  # chosen when the model is built
LARGEST_EXACT = 2**53  # up to here each whole number is a float of its own
CHECKED = (*WHOLE_WITH_MINIMUM, *BETWEEN_0_AND_1, *NOT_NEGATIVE)


def meant(value: Any) -> Any:
    """What the writer of YAML means, at any depth: ``1e5``, a text to YAML 1.1, is a number, and ``None`` is ``None``."""
    if isinstance(value, dict):
        return {key: meant(one) for key, one in value.items()}
    if isinstance(value, list):
        return [meant(one) for one in value]
    if not isinstance(value, str):
        return value
    if value == "None":
        return None
    try:
        number = float(value)
    except ValueError:
        return value
    return int(number) if number.is_integer() and abs(number) < LARGEST_EXACT else number


def whole(name: str, value: Any, minimum: int) -> int:
    """
    ``value`` as an ``int``; a float without a fraction counts as whole, so ``1e6`` works.

    :param name: the setting's name, for the error
    :param value: a number
    :param minimum: the smallest value allowed
    :raises ValueError: for a fraction, a value below ``minimum`` or no number at all
    """
    number = real(name, value)
    if number != int(number):
        raise ValueError(f"{name} must be a whole number, not {value!r}")
    if number < minimum:
        raise ValueError(f"{name} must be at least {minimum}, not {value!r}")
    return int(value)


def real(name: str, value: Any) -> float:
    """``value`` as a finite ``float``; raises ``ValueError`` for anything else."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if isinstance(value, (str, bool)) or not math.isfinite(number):
        raise ValueError(f"{name} must be a finite number, not {value!r}")
    return number


def checked_auto(name: str, value: str) -> str:
    """The one text that some settings take in place of a number."""
    if value != AUTO:
        raise ValueError(f'{name} must be a whole number or "{AUTO}", not {value!r}')
    return value


def share(name: str, value: Any) -> float:
    """``value`` if it is from 0 to 1."""
    number = real(name, value)
    if not 0 <= number <= 1:
        raise ValueError(f"{name} must be between 0 and 1, not {value!r}")
    return number


def above_0(name: str, value: Any) -> float:
    """``value`` if it is a number above 0."""
    number = real(name, value)
    if number <= 0:
        raise ValueError(f"{name} must be above 0, not {value!r}")
    return number


def checked(name: str, value: Any) -> Any:
    """The value of one of the ``CHECKED`` settings, in its own type and range, or ``ValueError``."""
    if name in MAY_BE_AUTO and isinstance(value, str):
        return checked_auto(name, value)
    if name in WHOLE_WITH_MINIMUM:
        return whole(name, value, WHOLE_WITH_MINIMUM[name])
    number = real(name, value)
    if name in BETWEEN_0_AND_1:
        return share(name, number)
    if name in NOT_NEGATIVE and number < 0:
        raise ValueError(f"{name} must not be negative, not {value!r}")
    return number


def checked_drop(drop: Any, n_quantiles: int) -> int:
    """``top_quantiles_to_drop_per_net``, which leaves at least one quantile of each critic; 0 for scalar critics."""
    drop = checked("top_quantiles_to_drop_per_net", drop)
    if n_quantiles == 1:
        return 0
    if drop >= n_quantiles:
        raise ValueError(f"top_quantiles_to_drop_per_net ({drop}; 2 unless given) must be below n_quantiles ({n_quantiles})")
    return drop


def checked_train_freq(name: str, value: Any) -> Any:
    """``train_freq`` as SB3 takes it: a whole number, or a pair of one and its unit, which YAML writes as a list."""
    if not isinstance(value, (tuple, list, str)):
        return whole(name, value, minimum=1)
    number, unit = value if isinstance(value, (tuple, list)) and len(value) == 2 else (1, None)
    if getattr(unit, "value", unit) not in ("step", "episode"):  # SB3 makes an Enum of it
        raise ValueError(f'{name} must be a number or a pair like (1, "step") or (1, "episode"), not {value!r}')
    pair = whole(name, number, minimum=1), unit
    return value._make(pair) if hasattr(value, "_make") else pair


def checked_rate(name: str, value: Any) -> Any:
    """A learning rate as it is if it is a schedule, else as a number that is not negative."""
    if callable(value):
        return value
    number = real(name, value)
    if number < 0:
        raise ValueError(f"{name} must not be negative, not {value!r}")
    return number


def checked_seed(name: str, value: Any) -> int | None:
    """A whole number from 0, or ``None`` for no seed."""
    return None if value is None else whole(name, value, minimum=0)


def checked_own_rate(name: str, value: Any) -> Any:
    """A network's own learning rate, or ``None`` for the algorithm's."""
    return None if value is None else checked_rate(name, value)


def checked_norm(name: str, value: Any) -> float | None:
    """A number above 0, or ``None`` for no bound."""
    return None if value is None else above_0(name, value)


def checked_folder(name: str, value: Any) -> str | None:
    """A folder's name as text, as SB3's zips have it, or ``None``."""
    if value is None:
        return None
    try:
        return os.fsdecode(value)
    except TypeError:
        raise ValueError(f"{name} must be a folder or None, not {value!r}") from None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of an error about a name that is not known: the nearest ones, or nothing."""
    near = difflib.get_close_matches(name, list(known))
    return f": did you mean {' or '.join(near)}?" if near else ""


def switch(name: str, value: Any) -> bool:
    """``value`` if it is ``True`` or ``False``: text such as ``"no"`` would count as on."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, not {value!r}")
    return value


def one_of(name: str, value: Any, choices: Sequence[str | None]) -> Any:
    """``value`` if it is one of ``choices``."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(str, choices))}, not {value!r}")
    return value


CHECKS: dict[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(CHECKED, checked),
    "train_freq": checked_train_freq,
    "learning_rate": checked_rate,
    "qf_learning_rate": checked_own_rate,
    "max_grad_norm": checked_norm,
    "seed": checked_seed,
    "tensorboard_log": checked_folder,
}
"""By setting, what returns its value in its own type and range or raises ``ValueError``."""
