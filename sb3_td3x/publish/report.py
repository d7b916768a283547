"""One run as one HTML page that loads nothing. The run may be untrusted: all text is escaped, and scripts are forbidden."""

import base64
import io
import math
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, StrictUndefined
from matplotlib.figure import Figure

from sb3_td3x import presets
from sb3_td3x.checkpoint import Store
from sb3_td3x.checkpoint.store import Checkpoint
from sb3_td3x.common import files
from sb3_td3x.results.plots import AXES, chart, run_curve
from sb3_td3x.results.run_dir import ALGORITHM, RunDir
from sb3_td3x.results.scores import Scores, csv_lines, label_of, of_run, score_text

STEPS = "time/total_timesteps"
CHARTS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("Training return", ("rollout/ep_rew_mean",), "mean of the last stats_window_size episodes, with exploration noise"),
    ("Episode length", ("rollout/ep_len_mean",), "steps, mean of the last stats_window_size episodes"),
    ("Success rate", ("eval/success_rate",), "fraction of an evaluation's episodes"),
    ("Critic loss", ("train/critic_loss",), "mean over the last call of train"),
    ("Actor loss", ("train/actor_loss",), "negative value of the actor's own actions"),
    ("Value and target", ("train/q_mean", "train/target_mean"), "means over a batch"),
    ("Gap between the critics", ("train/twin_gap",), "largest minus smallest critic, mean over a batch"),
    ("Saturated actions", ("train/action_saturation",), "fraction of the actor's action components beyond 0.99"),
    ("Exploration noise", ("rollout/action_noise_std",), "standard deviation, actions scaled to [-1, 1]"),
    ("Learning rate", ("train/learning_rate", "train/qf_learning_rate"), "of the optimizers"),
    ("Environment steps per second", ("time/fps",), "since training began or was resumed"),
    ("Updates per second", ("time/updates_per_second",), "since the last log output"),
    ("Replay buffer", ("train/replay_size",), "transitions"),
)
"""Title, keys of the log, and explanation of each chart. Any other key but ``NOT_DRAWN`` gets one under its own name."""
NOT_DRAWN = {STEPS, "time/episodes", "time/time_elapsed", "train/n_updates", "eval/mean_reward", "eval/mean_ep_length"}


def write(run: RunDir, out: Path, trust: bool = False) -> None:
    """Write the page of a run, or of what an unfinished one has; ``ValueError`` if its settings cannot be read."""
    if out.suffix != ".html":
        raise ValueError(f"a report is an .html file, not {out.name!r}")
    run.require_no_links(trust)  # what they lead to would be in the page
    files.write(out, render(run).encode(errors="replace"))


def render(run: RunDir) -> str:
    template = Path(__file__).with_name("report.html.j2").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    arguments, config = run.arguments(), run.config() if run.config_file.is_file() else {}
    steps, saved = config.get("n_timesteps"), Store(run.checkpoints).checkpoints()
    planned = steps if isinstance(steps, (int, float)) and abs(steps) < 1e100 else 0
    notes: list[str] = []
    scores = _read(of_run, run, "scores", notes)
    lines = _read(csv_lines, run.log, "training diagnostics", notes) or [{}]
    log = {name: np.array([_number(line.get(name)) for line in lines]) for name in lines[0] if name}
    if not run.video.is_file():
        # Without --video it may open a window
        making = shlex.join(["td3x", "enjoy", run.path.as_posix(), "--video", run.video.as_posix()])
        notes.append(f"There is no video yet. To make one: {making}")
    axes = [] if scores is None else ["steps", "time"] if np.isfinite(scores.seconds).any() else ["steps"]
    return environment.from_string(template).render(
        env_id=run.env_id,
        setting=label_of(arguments.get("algo"), arguments.get("setting")),
        preset=arguments.get("preset"),
        is_changed=bool(arguments.get("overrides")),
        seed=arguments.get("seed"),
        facts=list(_facts(saved, planned, scores, log)),
        curves=[{"title": f"Score over {AXES[axis]}", "picture": _picture(run_curve(scores, axis))} for axis in axes],
        charts=list(_charts(log)),
        video=_data_uri("video/mp4", run.video.read_bytes()) if run.video.is_file() else None,
        commands=list(_commands(run, saved, planned, arguments)),
        tables={
            "Hyperparameters": _lines(config),
            "Arguments": _lines({key: value for key, value in arguments.items() if key != "versions"}),
            "Versions": _lines(arguments.get("versions")),
        },
        notes=notes,
    )


def _read(read: Callable[[Any], Any], source: Any, what: str, notes: list[str]) -> Any:
    """``None`` and a note for what is missing or damaged."""
    try:
        return read(source)
    except (ValueError, OSError) as error:
        notes.append(f"There are no {what}: {error}")
        return None


def _number(text: str | None) -> float:
    """A number of the log; NaN for anything else."""
    try:
        number = float(text or "nan")
    except ValueError:
        return math.nan
    return number if abs(number) < 1e100 else math.nan  # the axes of a chart overflow long before a float does


def _facts(
    saved: Sequence[Checkpoint], planned: float, scores: Scores | None, log: Mapping[str, np.ndarray]
) -> Iterator[tuple[str, str, str]]:
    """The facts at the top of the page: name, value, remark."""
    logged = np.nan_to_num(log.get(STEPS, np.zeros(0)))
    evaluated = np.zeros(0) if scores is None else scores.steps
    done = int(max([0, *logged, *evaluated, *(checkpoint.steps for checkpoint in saved)]))
    if scores is not None:
        best = int(np.nan_to_num(scores.mean, nan=-np.inf).argmax())
        yield "best score", score_text(scores.mean[best]), f"at {scores.steps[best]:,.0f} steps"
        yield "last score", score_text(scores.mean[-1]), f"± {score_text(scores.spread[-1])} over its episodes"
    yield "steps", f"{done:,}", "" if not planned else "finished" if done >= planned else f"of {planned:,.0f}, unfinished"
    if scores is not None and (timed := (scores.seconds > 0) & (scores.seconds < 1e13)).any():  # `timedelta` ends there
        seconds, steps = scores.seconds[timed][-1], scores.steps[timed][-1]
        remark = f"up to the evaluation at {steps:,.0f} steps, {steps / seconds:,.0f} steps per second"
        yield "time", str(timedelta(seconds=round(seconds))), remark


def _charts(log: Mapping[str, np.ndarray]) -> Iterator[dict[str, str]]:
    """A chart for each diagnostic that the log has."""
    steps = log.get(STEPS, np.zeros(0))
    charted = {key for _, keys, _ in CHARTS for key in keys}
    for title, keys, text in (*CHARTS, *((key, (key,), "") for key in log if key not in charted | NOT_DRAWN)):
        known = {key: np.isfinite(steps) & np.isfinite(log[key]) for key in keys if key in log and len(steps)}
        if lines := {key: (steps[rows], log[key][rows]) for key, rows in known.items() if rows.any()}:
            yield {"title": title, "text": text, "keys": ", ".join(lines), "picture": _picture(chart(lines))}


def _picture(figure: Figure) -> str:
    """As a data URI; a dark page inverts its colors."""
    figure.savefig(content := io.BytesIO(), format="svg", transparent=True, metadata={"Date": None})
    return _data_uri("image/svg+xml", content.getvalue())


def _data_uri(media_type: str, content: bytes) -> str:
    return f"data:{media_type};base64,{base64.b64encode(content).decode()}"


def _lines(values: Any) -> list[tuple[str, str]]:
    """Settings as name and value, each on one line of YAML."""
    pairs = values.items() if isinstance(values, Mapping) else ()
    return [(str(name), value if isinstance(value, str) else presets.written(value)) for name, value in pairs]


def _commands(
    run: RunDir, saved: Sequence[Checkpoint], planned: float, arguments: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """Title and command line; none for a run of rl-zoo3's scripts."""
    if arguments.get("algo") != ALGORITHM or "overrides" not in arguments:
        return
    if command := run.command():
        yield "Repeat it", command
    if saved:
        steps = saved[-1].steps
        longer = ["--steps", f"{2 * planned:.0f}"] if 0 < planned <= steps else []
        title = "Continue to twice the steps" if longer else f"Resume from step {steps:,}"
        yield title, shlex.join(["td3x", "train", "--resume", run.path.as_posix(), *longer])
    yield "Evaluate it on fresh episodes", shlex.join(["td3x", "eval", run.path.as_posix()])
