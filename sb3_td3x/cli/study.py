"""``td3x study``: all runs of a study file, on this machine or on a Ray cluster, with a live table."""

import signal
from collections import Counter
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.live import Live
from rich.table import Table

from sb3_td3x.cli.console import PlainConsole
from sb3_td3x.common.signals import acknowledge, stop_signals
from sb3_td3x.errors import escaped
from sb3_td3x.results.scores import score_text

if TYPE_CHECKING:
    from sb3_td3x.runs.study import Progress, StudyFolder, StudyRun

STATES = ("running", "failed", "stopped", "waiting", "done")


def command(
    file: Annotated[Path, typer.Argument(metavar="FILE.yml", help="The study: environments, seeds and settings.")],
    ray: Annotated[str | None, typer.Option(metavar="ADDRESS", help="Runs on Ray: local, or a cluster's address.")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Runs at a time on this machine; one per core if left out.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the study, shared by all machines; else studies/FILE.")] = None,
    only: Annotated[int | None, typer.Option(min=0, help="Only run N, counted from 0: one job of a scheduler.")] = None,
) -> None:
    """Run what is unfinished in a study. Ctrl-C stops it cleanly; the same command resumes it."""
    from sb3_td3x.runs import runners, study

    place = (out or Path("studies") / file.stem).resolve()
    runs = study.read(file)
    if [ray, jobs, only].count(None) < 2:
        raise ValueError("give one of --jobs, --ray and --only: a cluster's cores limit its runs, --only makes one run")
    if only is not None and only >= len(runs):
        raise ValueError(f"{file} has {len(runs)} runs: --only can be 0 to {len(runs) - 1}, not {only}")
    grid, runs = runs, runs if only is None else [runs[only]]
    folder = study.StudyFolder.at(place)
    try:
        study.check(grid, folder, runs)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    console, table, summary = PlainConsole(), RunsTable(runs, folder), place / "summary.csv"
    if only is not None:  # one job of a scheduler
        console.print(f"{runs[0].name}, which prints to {folder.printed(runs[0])}")
        folder.runs.mkdir(parents=True, exist_ok=True)
        try:
            study.attempt(study.train_td3x, folder, runs[0])
        except Exception:
            folder.write_summary(grid, summary)  # a run that fails has its line too
            raise
    else:
        threads = max(run.options.get("threads", 1) for run in runs)
        runner = runners.local(jobs or runners.jobs_here(threads)) if ray is None else runners.on_ray(ray, threads)
        count = f"{len(runs)} run{'' if len(runs) == 1 else 's'}"
        console.print(f"{count}, done before: {sum(map(folder.is_finished, runs))} → {place}")
        for number in (signal.SIGINT, *stop_signals()):  # SIGINT too: a shell lets its background jobs ignore it
            signal.signal(number, _stop)
        live = Live(get_renderable=table.render, console=console, refresh_per_second=0.5) if console.is_interactive else None
        try:
            with live or nullcontext(), closing(runners.drive(runs, folder, study.train_td3x, runner)) as ended:
                for run, problem in ended:
                    table.errors[run] = problem
                    if live is None:
                        console.print(table.line(run))
        except KeyboardInterrupt:
            console.print("stopped; each run resumes from its last checkpoint")
    _report(console, table, grid, summary)


def _stop(number: int, frame: Any) -> None:
    for other in stop_signals():  # a closed terminal sends two, and only Ctrl-C aborts
        signal.signal(other, signal.SIG_IGN)
    acknowledge()
    raise KeyboardInterrupt


def _report(console: PlainConsole, table: "RunsTable", grid: "list[StudyRun]", summary: Path) -> None:
    """Print the result of the study and write its summary; exit code 1 unless every run is finished."""
    for run, error in table.errors.items():
        if error:
            console.print(f"{run.name} failed: {error}\n  see {table.folder.printed(run)}")
    table.folder.write_summary(grid, summary)
    done = sum(map(table.folder.is_finished, table.runs))
    console.print(f"{done} of {len(table.runs)} runs are done → {summary}")
    if done < len(table.runs):
        console.print("the same command resumes the rest")
        raise typer.Exit(1)


class RunsTable:
    """The progress of a study's runs, read from its folder."""

    def __init__(self, runs: "list[StudyRun]", folder: "StudyFolder"):
        self.runs, self.folder = runs, folder
        self.totals = {run: run.experiment().hyperparameters()["n_timesteps"] for run in runs}
        self.errors: dict[StudyRun, str] = {}  # of the runs that have ended

    def progress(self, run: "StudyRun") -> "Progress":
        current = self.folder.progress(run)
        return replace(current, state="failed") if self.errors.get(run) and current.state != "done" else current

    def line(self, run: "StudyRun") -> str:
        current = self.progress(run)
        score = "no score yet" if current.score is None else f"score {score_text(current.score)}"
        return f"{run.name}: {current.state} at {current.steps:,} of {self.totals[run]:,} steps, {score}"

    def render(self) -> Table:
        """The table, with running runs first: a study may have more runs than a terminal has lines."""
        states = {run: self.progress(run) for run in self.runs}
        counts = Counter(current.state for current in states.values())
        title = ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state])
        table = Table(title=title, title_justify="left", box=None, header_style="bold")
        for column in ("setting", "environment", "seed", "steps", "steps/s", "score", "state"):
            is_name = column in ("setting", "environment")  # in a narrow terminal names are cut, numbers are not
            table.add_column(column, justify="left" if is_name or column == "state" else "right", no_wrap=not is_name)
        for run, current in sorted(states.items(), key=lambda pair: STATES.index(pair[1].state)):
            rate = "" if current.rate is None else f"{current.rate:.0f}"
            score = "" if current.score is None else score_text(current.score)
            steps = f"{current.steps:,}/{self.totals[run]:,}"
            table.add_row(escaped(run.setting), escaped(run.env), str(run.seed), steps, rate, score, current.state)
        return table
