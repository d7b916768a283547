"""What manifests and states are made of. One that somebody else wrote may hold anything, and its checksums fit."""

from collections.abc import Callable
from typing import Any

from sb3_td3x.checkpoint import generators, log_state
from sb3_td3x.saving import plain

Check = Callable[[Any], bool]


def _a(*kinds: type) -> Check:
    return lambda value: isinstance(value, kinds)


def _optional(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _many(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _table(check: Check) -> Check:
    return lambda value: isinstance(value, dict) and all(isinstance(key, str) and check(one) for key, one in value.items())


def _parts(**checks: Check) -> Check:
    return lambda value: isinstance(value, dict) and all(check(value.get(name)) for name, check in checks.items())


def _count(value: Any) -> bool:
    return isinstance(value, int) and 0 <= value < 2**63


def _generator(value: Any) -> bool:
    """Numpy follows a position behind the end of a generator's memory, so its state is tried on another one."""
    try:
        plain.numpy_generator(value)
    except Exception:  # numpy has no common class for what it says of other states
        return False
    return True


def _record(value: Any) -> bool:
    """A value of ``log_state.unwritten``."""
    is_long_enough = isinstance(value, list) and len(value) >= 2
    return is_long_enough and isinstance(value[0], log_state.RECORDED) and _count(value[1]) and all(map(_a(str), value[2:]))


_FILE = {"bytes": _count, "sha256": _a(str)}
_SEGMENT = _parts(**_FILE, file=_a(str), first=_count, last=_count, prints=_optional(_many(_a(str))))
_BUFFER = _parts(
    **{"class": _a(str)}, buffer_size=_count, n_envs=_count, memory=_a(dict), added=_count, segments=_many(_SEGMENT)
)
MANIFEST: dict[str, Check] = {
    **dict.fromkeys(("format", "number", "steps"), _count),
    "files": _table(_parts(**_FILE)),
    "logs": _table(_count),
    "replay": lambda value: value == {} or _BUFFER(value),
    "versions": _a(dict),
    "machine": _optional(_a(dict)),  # not in the manifests of older versions
    "total": lambda value: isinstance(value, float) or _count(value),
}
_ENVIRONMENT = _parts(classes=_many(_a(str)), layers=_a(list), random=_optional(_generator), complete=_a(bool))
_WORLD = _parts(
    envs=_optional(_many(_ENVIRONMENT)),
    vec=_many(_optional(_parts(**{"class": _a(str)}))),
    seeds=_optional(_many(_optional(_count))),
    complete=_a(bool),
)
STATE: dict[str, Check] = {
    "generators": generators.are_valid,
    "world": _WORLD,
    "callbacks": _table(_parts(attributes=_table(lambda value: True), matters=_a(bool), world=_optional(_WORLD))),
    "files": _table(_a(str)),
    "log": _optional(_table(_record)),  # not in the states of older versions
}


def unlike(value: Any, parts: dict[str, Check]) -> str | None:
    """
    The first part of a manifest or a state that is not as we write it, ``None`` if all are.

    :param parts: ``MANIFEST`` or ``STATE``
    """
    return next((name for name, check in parts.items() if not _parts(**{name: check})(value)), None)
