"""
A run as one HTML page: scores, training diagnostics, film, settings, and the commands that repeat it and go on with it.

Everything is in the page; it loads nothing. A run's folder may come from a stranger: all text is escaped, files outside of the
folder are not read, and the page's own content policy forbids scripts and the network.
"""

import base64
import io
import math
import shlex
from collections.abc import Iterator, Mapping
from importlib.resources import files as package_files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from sb3_td3x import presets
from sb3_td3x.checkpoint import Store
from sb3_td3x.common import files
from sb3_td3x.results.run_dir import ALGORITHM, SCORES, RunDir
from sb3_td3x.results.scores import Scores, csv_lines, of_run, score_text
from sb3_td3x.runs import repetition

MOST_FILM = 40_000_000
"""Bytes of the largest film that is taken."""
MOST_NUMBER = 1e100
"""Numbers of a log beyond it are left out: the picture's axes overflow long before a float does."""
STEPS = "time/total_timesteps"
CHARTS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("Training return", ("rollout/ep_rew_mean",), "mean of the last stats_window_size episodes, with exploration noise"),
    ("Episode length", ("rollout/ep_len_mean",), "steps, mean of the last stats_window_size episodes"),
    ("Success rate", ("rollout/success_rate",), "share of the last stats_window_size episodes"),
    ("Critic loss", ("train/critic_loss",), "mean over the last training"),
    ("Encoder loss", ("train/encoder_loss",), "of the state-action encoder, mean over the last training"),
    ("Actor loss", ("train/actor_loss",), "minus the value of the actor's own actions"),
    ("Value and target", ("train/q_mean", "train/target_mean"), "means over a batch"),
    ("Gap between the twins", ("train/twin_gap",), "largest minus smallest critic, mean over a batch"),
    ("Saturated actions", ("train/action_saturation",), "share of the actor's action components beyond 0.99"),
    ("Exploration noise", ("rollout/action_noise_std",), "standard deviation, actions scaled to [-1, 1]"),
    ("Learning rate", ("train/learning_rate", "train/qf_learning_rate"), "of the optimisers"),
    ("Environment steps per second", ("time/fps",), "since training began"),
    ("Updates per second", ("time/updates_per_second",), "since the last log output"),
    ("Replay buffer", ("train/replay_size",), "transitions"),
)
"""Title, keys of the log, explanation. Keys beside these get a chart under their own name."""
NOT_DRAWN = {STEPS, "time/episodes", "time/time_elapsed", "train/n_updates", "eval/mean_reward", "eval/mean_ep_length"}
MOST_CHARTS = 40


def require_libraries() -> None:
    """
    :raises ValueError: with what to install
    """
    if missing := [name for name in ("matplotlib", "jinja2") if find_spec(name) is None]:
        raise ValueError(f"td3x report needs {' and '.join(missing)}: pip install {' '.join(missing)}")


def write(run: RunDir, out: Path) -> None:
    """
    Write a run's page; an unfinished run's, and one without film or log, has what there is.

    :param run: the run
    :param out: the ``.html`` to write, replaced in one step
    :raises ValueError: for another kind of file, settings that cannot be read, or a library that is missing
    """
    if out.suffix != ".html":
        raise ValueError(f"a report is an .html, not {out.name!r}")
    page = render(run)
    out.parent.mkdir(parents=True, exist_ok=True)
    files.write(out, page.encode(errors="replace"))


def render(run: RunDir) -> str:
    """The page; parameters and errors as for ``write``."""
    require_libraries()
    from jinja2 import Environment, StrictUndefined

    template = package_files("sb3_td3x.publish").joinpath("report.html.j2").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(template).render(**_content(run))


def _content(run: RunDir) -> dict[str, Any]:
    """All that the template shows, as text, numbers and data URIs."""
    run.require_own(run.args_file, run.config_file)
    arguments, config = run.arguments(), run.config() if run.config_file.exists() else {}
    notes: list[str] = []
    scores = _scores(run, notes)
    log = _log(run, notes)
    versions = arguments.get("versions")
    return {
        "env_id": run.env_id,
        "setting": " ".join([str(arguments.get("algo", "")).upper(), str(arguments.get("setting") or "")]).strip(),
        "preset": arguments.get("preset"),
        "seed": arguments.get("seed"),
        "facts": _facts(run, config, scores, log),
        "curves": _curves(scores),
        "charts": list(_charts(log)),
        "film": _film(run, notes),
        "commands": _commands(run, config, arguments),
        "config": _lines(config),
        "arguments": _lines({key: value for key, value in arguments.items() if key != "versions"}),
        "versions": _lines(versions) if isinstance(versions, dict) else [],
        "notes": notes,
    }


def _scores(run: RunDir, notes: list[str]) -> Scores | None:
    if not run.evaluations.exists():
        notes.append("The run has no evaluations yet.")
        return None
    try:
        run.require_own(run.evaluations, run.path / SCORES)
        return of_run(run)
    except (ValueError, OSError) as error:
        notes.append(f"The scores cannot be shown: {error}")
        return None


def _log(run: RunDir, notes: list[str]) -> dict[str, np.ndarray]:
    """The log's columns of numbers, each ``(lines,)``, NaN where a line has none."""
    if not run.log.is_file() or run.leads_out(run.log):
        notes.append(f"The run has no log ({run.log.name}): there are no training diagnostics.")
        return {}
    try:
        rows = csv_lines(run.log)
    except ValueError as error:
        notes.append(f"{run.log.name} cannot be read: {error}")
        return {}
    names = [name for name in (rows[0] if rows else {}) if name]
    return {name: np.array([_number(row.get(name)) for row in rows]) for name in names}


def _number(text: str | None) -> float:
    try:
        number = float(text or "nan")
    except ValueError:
        return math.nan
    return number if abs(number) < MOST_NUMBER else math.nan


def _facts(
    run: RunDir, config: Mapping[str, Any], scores: Scores | None, log: Mapping[str, np.ndarray]
) -> list[tuple[str, str, str]]:
    """What is told first: name, value, remark."""
    done = int(_last(log.get(STEPS, np.zeros(0))) or 0)
    if saved := Store(run.checkpoints).checkpoints():
        done = max(done, saved[-1].steps)
    facts = []
    if scores is not None:
        done = max(done, int(scores.steps[-1]))
        best = int(scores.mean.argmax())
        facts.append(("best score", score_text(scores.mean[best]), f"at {scores.steps[best]:,.0f} steps"))
        facts.append(("last score", score_text(scores.mean[-1]), f"± {score_text(scores.spread[-1])} over its episodes"))
    planned = _planned(config)
    state = "" if not planned else "finished" if done >= planned else f"of {planned:,.0f}, unfinished"
    facts.append(("steps", f"{done:,}", state))
    return facts + _time(scores, log, done)


def _planned(config: Mapping[str, Any]) -> float:
    """Steps that the run is to make, 0 where its settings do not say."""
    total = config.get("n_timesteps")
    return float(total) if isinstance(total, (int, float)) and math.isfinite(total) else 0.0


def _time(scores: Scores | None, log: Mapping[str, np.ndarray], done: int) -> list[tuple[str, str, str]]:
    """Up to the last evaluation, whose number of steps is known; the log's clock begins with each process."""
    if scores is not None and (timed := scores.seconds > 0).any():
        seconds, steps = scores.seconds[timed][-1], scores.steps[timed][-1]
        until = "" if steps == done else f"to the evaluation at {steps:,.0f} steps, "
        return [("time", _duration(seconds), f"{until}{steps / seconds:,.0f} steps per second, evaluations included")]
    seconds, rate = (_last(log.get(f"time/{name}", np.zeros(0))) for name in ("time_elapsed", "fps"))
    return [("time", _duration(seconds), f"{rate:,.0f} steps per second")] if seconds and rate else []


def _last(values: np.ndarray) -> float | None:
    known = values[np.isfinite(values)]
    return float(known[-1]) if len(known) else None


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def _curves(scores: Scores | None) -> list[dict[str, str]]:
    """The learning curve over steps and, where the times are known, over time."""
    if scores is None:
        return []
    from sb3_td3x.results.plots import AXES, plain

    kinds = ["steps", *(["time"] if np.isfinite(scores.seconds).any() else [])]
    return [
        {"title": f"Score over {AXES[kind]}", **_both_themes(lambda theme, kind=kind: plain(scores, kind, theme))}
        for kind in kinds
    ]


def _charts(log: Mapping[str, np.ndarray]) -> Iterator[dict[str, str]]:
    if STEPS not in log:
        return
    from sb3_td3x.results.plots import chart

    named = {key for _, keys, _ in CHARTS for key in keys}
    others = [(key, (key,), "") for key in log if key not in named | NOT_DRAWN]
    for title, keys, text in [*CHARTS, *others][:MOST_CHARTS]:
        lines = {key: (log[STEPS][known], log[key][known]) for key in keys if key in log for known in [_known(log, key)]}
        if lines := {key: line for key, line in lines.items() if len(line[0])}:
            pictures = _both_themes(lambda theme, lines=lines: chart(lines, theme))
            yield {"title": title, "text": text, "keys": ", ".join(lines), **pictures}


def _known(log: Mapping[str, np.ndarray], key: str) -> np.ndarray:
    return np.isfinite(log[STEPS]) & np.isfinite(log[key])


def _both_themes(draw: Any) -> dict[str, str]:
    """A picture for light and one for dark pages, as data URIs."""
    from sb3_td3x.results.plots import DARK, LIGHT

    return {name: _svg(draw(theme)) for name, theme in (("light", LIGHT), ("dark", DARK))}


def _svg(figure: Any) -> str:
    content = io.BytesIO()
    figure.savefig(content, format="svg", transparent=True, metadata={"Date": None})
    return _data_uri("image/svg+xml", content.getvalue())


def _data_uri(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def _film(run: RunDir, notes: list[str]) -> str | None:
    if not run.film.is_file() or run.leads_out(run.film):
        notes.append("There is no film yet: td3x enjoy makes one.")
        return None
    if run.film.stat().st_size > MOST_FILM:
        notes.append(f"The film is larger than {MOST_FILM / 1e6:.0f} MB and was left out.")
        return None
    return _data_uri("video/mp4", run.film.read_bytes())


def _lines(values: Mapping[Any, Any]) -> list[tuple[str, str]]:
    """Settings as name and value, each on a line of YAML."""
    return [(str(name), value if isinstance(value, str) else presets.written(value)) for name, value in values.items()]


def _commands(run: RunDir, config: Mapping[str, Any], arguments: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Title and command line, safe to paste whatever the folder says."""
    if arguments.get("algo") != ALGORITHM or "overrides" not in arguments:
        return []  # rl-zoo3's, which td3x neither repeats nor goes on with
    found = [("Repeat it", "\n".join(repetition.commands(arguments)))]
    saved = Store(run.checkpoints).checkpoints()
    if saved:
        # The settings know it better than a checkpoint: a run that is extended may not have made one since
        planned = _planned(config) or saved[-1].total
        longer = ["--steps", f"{2 * planned:.0f}"] if 0 < planned <= saved[-1].steps else []
        resume = shlex.join(["td3x", "train", "--resume", str(run.path), *longer])
        found.append(("Go on to twice the steps" if longer else f"Go on from step {saved[-1].steps:,}", resume))
    found.append(("Score it on fresh episodes", shlex.join(["td3x", "eval", str(run.path)])))
    return found
