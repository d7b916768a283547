"""The small commands. They import what needs torch after opening the run's folder, so that an error appears at once."""

from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal

import typer
from rich.table import Table

from sb3_td3x import presets
from sb3_td3x.cli.console import PlainConsole
from sb3_td3x.common.validation import check_net_arch
from sb3_td3x.results.run_dir import RunDir
from sb3_td3x.results.scores import score_text

RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")]
Trust = Annotated[bool, typer.Option("--trust", help="Run the code that the run's files may hold.")]
Seed = Annotated[int, typer.Option(min=0, help="Determines the episodes; training used other ones.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]


def evaluate(
    run: RunFolder,
    episodes: Annotated[int, typer.Option(min=1, help="Number of episodes.")] = 10,
    seed: Seed = 1_000,
    device: Device = "auto",
    trust: Trust = False,
) -> None:
    """Evaluate a run's best model on fresh episodes, without noise."""
    folder = RunDir.open(run)
    from sb3_td3x.runs import play

    successes: list[Any] = []

    def note_success(state: dict[str, Any], _: Any) -> None:
        if state["done"] and state["info"].get("is_success") is not None:
            successes.append(state["info"]["is_success"])

    returns = play.evaluate(folder, episodes, seed, device, trust, callback=note_success)
    mean, spread, low, high = map(score_text, (returns.mean(), returns.std(), returns.min(), returns.max()))
    scored = f"return {mean} ± {spread} (episodes: {len(returns)}, from {low} to {high})"
    scored += f", success {sum(successes) / len(returns):.0%}" if successes else ""
    PlainConsole().print(f"{folder.env_id}, {folder.model().name}: {scored}")


def enjoy(
    run: RunFolder,
    video: Annotated[Path | None, typer.Option(help="Write a video to this .mp4 instead of opening a window.")] = None,
    episodes: Annotated[int, typer.Option(min=1, help="Episodes to show in the window.")] = 3,
    seed: Seed = 1_000,
    trust: Trust = False,
) -> None:
    """Watch a run's best model, in a window or as a video."""
    folder = RunDir.open(run)
    from sb3_td3x.runs import play

    console, out = PlainConsole(), video or folder.video
    if video is None and play.has_display():
        for score in play.evaluate(folder, episodes, seed, "cpu", trust, render_mode="human"):
            console.print(f"return {score_text(score)}")
        return
    if video is None:
        console.print("there is no display: making a video")
        folder.require_no_links(trust)  # its folder of videos may be one
    with console.status("recording"):
        console.print(f"{out} ({play.record_video(folder, out, seed, trust=trust)})")


def plot(
    runs: Annotated[list[Path], typer.Argument(metavar="RUNS", help="Folders of runs or studies, or tables of scores.")],
    out: Annotated[Path, typer.Option(help="Picture to write (.png, .svg or .pdf).")] = Path("curve.png"),
    x: Annotated[Literal["steps", "time", "both"], typer.Option(help="Over steps, wall-clock time, or both.")] = "steps",
) -> None:
    """Plot learning curves, with intervals over seeds."""
    from sb3_td3x.results import plots, scores

    plots.draw(scores.read(runs), out, ("steps", "time") if x == "both" else (x,))
    PlainConsole().print(str(out))


def report(
    run: RunFolder,
    out: Annotated[Path | None, typer.Option(help="Page to write (.html); RUN/report.html if left out.")] = None,
    trust: Annotated[bool, typer.Option("--trust", help="Also show what links out of the run's folder lead to.")] = False,
) -> None:
    """Write one HTML page about a run, finished or not."""
    folder = RunDir.open(run)
    from sb3_td3x.publish import report

    page = out or folder.report
    report.write(folder, page, trust)
    PlainConsole().print(f"{page} ({page.stat().st_size / 1e6:.1f} MB)")


def export(
    run: RunFolder,
    onnx: Annotated[Path | None, typer.Option(help="File to write; beside the model if left out.")] = None,
    trust: Trust = False,
) -> None:
    """Export a run's best model, with its normalization, to ONNX."""
    folder = RunDir.open(run)
    out = onnx or folder.model().with_suffix(".onnx")
    from sb3_td3x.runs import play

    with closing(play.open_evaluation_env(folder, seed=0, trust=trust)) as env:
        play.load_model(folder, env, "cpu", trust).export_onnx(out)
    PlainConsole().print(str(out))


def push(
    run: RunFolder,
    repo: Annotated[str, typer.Option(help="Repository on the Hub, as user/name; made if it is not there.")],
    to_folder: Annotated[Path | None, typer.Option(help="Write the files here and upload nothing.")] = None,
    episodes: Annotated[int, typer.Option(min=1, help="Episodes of the evaluation that the model card reports.")] = 10,
    seed: Seed = 1_000,
    private: Annotated[bool, typer.Option("--private", help="Make a repository that others cannot see.")] = False,
    trust: Annotated[bool, typer.Option("--trust", help="Push a model that readers have to trust you to load.")] = False,
) -> None:
    """Evaluate a run's best model and upload it to the Hugging Face Hub."""
    console, folder = PlainConsole(), RunDir.open(run)
    from sb3_td3x.publish import hub

    with TemporaryDirectory() as temporary:
        out = to_folder or Path(temporary)
        with console.status("evaluating"):
            hub.write(folder, out, repo, episodes, seed, trust)
        if to_folder is None:
            with console.status("uploading"):
                console.print(hub.upload(out, repo, private))
        else:
            console.print(str(out))


def pull(
    repo: Annotated[str, typer.Argument(metavar="REPO", help="Repository on the Hub, as user/name.")],
    out: Annotated[Path, typer.Option(help="Folder that holds the runs.")] = Path("logs"),
) -> None:
    """Download a run from the Hugging Face Hub."""
    from sb3_td3x.publish import hub

    console = PlainConsole()
    with console.status("downloading"):
        console.print(str(hub.pull(repo, out).path))


def bench(
    batch: Annotated[int, typer.Option(min=1, help="Transitions per update.")] = 256,
    net: Annotated[str, typer.Option(help="Hidden layers.")] = "400,300",
    quantiles: Annotated[int, typer.Option(min=1, help="Also measure critics with this number of quantiles.")] = 1,
    threads: Annotated[int, typer.Option(min=1, help="Torch threads.")] = 1,
    device: Device = "cpu",
    quick: Annotated[bool, typer.Option("--quick", help="About 20 seconds, not two minutes; compiling adds to it.")] = False,
) -> None:
    """Measure updates: TD3X's paths compared with SB3's TD3 at equal settings, in two minutes at most."""
    layers = check_net_arch("--net", presets.parse(f"[{net}]"))
    import torch as th
    from stable_baselines3.common.utils import get_device

    from sb3_td3x.runs import bench as measuring
    from sb3_td3x.runs.experiment import require_device

    require_device(device)
    device = str(get_device(device))
    case = measuring.Case(batch, tuple(layers), n_quantiles=quantiles)
    th.set_num_threads(threads)
    console = PlainConsole()
    console.print(f"batch {batch}, net {net}, threads {threads}, {device}")
    updates = measuring.contenders(case, device, console.print)
    per_turn, seconds = (10, 20.0) if quick else (40, 120.0)
    taken = measuring.take_turns(updates, device, per_turn, seconds, console.print)
    table = Table(box=None, header_style="bold")
    table.add_column("one update")  # in a narrow terminal names are broken, numbers are not
    for heading in ("ms", "fastest", "slowest", "times SB3's rate"):
        table.add_column(heading, justify="right", min_width=max(map(len, heading.split())))
    for row in measuring.rows(taken):
        table.add_row(row["name"], *(f"{row[key]:.2f}" for key in ("ms", "fastest", "slowest", "times_sb3")))
    console.print(table, soft_wrap=False)
