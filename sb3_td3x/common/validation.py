"""Checks of what a user may set: types and ranges, by setting. Importing this module is cheap: it needs no torch."""

import difflib
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

AUTO = "auto"


def check_float(
    name: str, value: Any, is_allowed: Callable[[float], bool] = math.isfinite, allowed: str = "a finite number"
) -> float:
    """``value`` as a finite ``float`` that is allowed. Like all checks here it raises ``ValueError`` for anything else."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if isinstance(value, (str, bool)) or not math.isfinite(number) or not is_allowed(number):
        raise ValueError(f"{name} must be {allowed}, not {value!r}")
    return number


check_probability = partial(check_float, is_allowed=lambda number: 0 <= number <= 1, allowed="a number between 0 and 1")
check_positive = partial(check_float, is_allowed=lambda number: number > 0, allowed="a number above 0")
check_not_negative = partial(check_float, is_allowed=lambda number: number >= 0, allowed="a number of at least 0")


def check_int(name: str, value: Any, minimum: int, *, or_auto: bool = False) -> Any:
    """``value`` as an ``int`` of at least ``minimum``; ``1e6`` is accepted, and with ``or_auto`` also ``"auto"``."""
    if or_auto and value == AUTO:
        return value
    allowed = f"a whole number of at least {minimum}" + (f' or "{AUTO}"' if or_auto else "")
    check_float(name, value, lambda number: number.is_integer() and number >= minimum, allowed)
    return int(value)


def check_bool(name: str, value: Any) -> bool:
    """``value`` if it is ``True`` or ``False``. Text such as ``"no"`` would count as true in Python."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, not {value!r}")
    return value


def check_choice(name: str, value: Any, choices: Sequence[str | None]) -> Any:
    """``value`` if it is one of ``choices``."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(str, choices))}, not {value!r}")
    return value


def check_learning_rate(name: str, value: Any) -> Any:
    """A schedule as it is, anything else as a number that is not negative."""
    return value if callable(value) and not isinstance(value, type) else check_not_negative(name, value)


def check_train_freq(name: str, value: Any) -> Any:
    """``train_freq`` as SB3 takes it: an integer, or a pair of one and its unit, which YAML writes as a list."""
    if not isinstance(value, (tuple, list, str)):
        return check_int(name, value, minimum=1)
    number, unit = value if isinstance(value, (tuple, list)) and len(value) == 2 else (1, None)
    if getattr(unit, "value", unit) not in ("step", "episode"):  # SB3 turns the unit into an Enum
        raise ValueError(f'{name} must be a number or a pair like [1, "step"] or [1, "episode"], not {value!r}')
    pair = check_int(name, number, minimum=1), unit
    return value._make(pair) if hasattr(value, "_make") else pair


def check_net_arch(name: str, net_arch: Any) -> Any:
    """Sizes of the hidden layers, of all networks or of actor (``pi``) and critics (``qf``); ``None`` is SB3's choice."""
    if net_arch is None:
        return None
    if isinstance(net_arch, dict) and net_arch.keys() == {"pi", "qf"}:
        return {network: check_net_arch(name, sizes or []) for network, sizes in net_arch.items()}
    if not isinstance(net_arch, (list, tuple)):
        raise ValueError(f"{name} must be a list of layer sizes, or {{'pi': sizes, 'qf': sizes}}, not {net_arch!r}")
    return [check_int(f"a size in {name}", size, minimum=1) for size in net_arch]


def check_class(name: str, value: Any) -> Any:
    """``value`` if it is a class, or another function that makes objects."""
    if not callable(value):
        raise ValueError(f"{name} must be a class, not {value!r}")
    return value


def _or_none(check: Callable[[str, Any], Any]) -> Callable[[str, Any], Any]:
    return lambda name, value: None if value is None else check(name, value)


CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "learning_rate": check_learning_rate,
    "buffer_size": partial(check_int, minimum=1),
    "batch_size": partial(check_int, minimum=1),
    "tau": check_probability,
    "gamma": check_probability,
    "train_freq": check_train_freq,
    "gradient_steps": partial(check_int, minimum=-1),  # -1: as many updates as environment steps since the last training
    "optimize_memory_usage": check_bool,
    "n_steps": partial(check_int, minimum=1),
    "policy_delay": partial(check_int, minimum=1),
    "target_policy_noise": check_not_negative,
    "target_noise_clip": check_not_negative,
    "seed": _or_none(partial(check_int, minimum=0)),
    "accelerate": partial(check_choice, choices=("auto", "plain", "compiled")),
    "precision": partial(check_choice, choices=("fp32", "bf16")),
    "n_quantiles": partial(check_int, minimum=1, or_auto=True),
    "top_quantiles_to_drop_per_net": partial(check_int, minimum=0),
    "qf_learning_rate": _or_none(check_learning_rate),
    "max_grad_norm": _or_none(check_positive),
    "prioritization": partial(check_choice, choices=(None, "lap")),
}
"""The check of each setting of ``TD3X``. It returns the value in its own type, or raises ``ValueError``."""

POLICY_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "net_arch": check_net_arch,
    "n_critics": partial(check_int, minimum=1),
    **dict.fromkeys(("normalize_images", "normalize_observations", "share_features_extractor"), check_bool),
    **dict.fromkeys(("activation_fn", "optimizer_class"), check_class),
    "features_extractor_class": _or_none(check_class),
}
"""The checks of those ``policy_kwargs`` that need neither spaces nor torch."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of an error about an unknown name: the nearest known names, or nothing."""
    near = difflib.get_close_matches(name, list(known))
    return f": did you mean {' or '.join(near)}?" if near else ""
