"""``td3x study``: all runs of a study file, on this machine or on a Ray cluster, with a live table."""

import signal
from collections import Counter
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table

if TYPE_CHECKING:
    from sb3_td3x.runs.study.folder import StudyFolder
    from sb3_td3x.runs.study.grid import StudyRun
    from sb3_td3x.runs.study.runners import Outcome, Runner
    from sb3_td3x.runs.study.watch import Progress


def command(
    file: Annotated[Path, typer.Argument(metavar="FILE.yml", help="The study: environments, seeds and settings.")],
    ray: Annotated[str | None, typer.Option(metavar="ADDRESS", help="Runs on Ray: local, or a cluster's address.")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Runs at a time on this machine; one per core if left out.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the study, which every node reaches; studies/FILE.")] = None,
) -> None:
    """
    Make all runs of a study, or those that are left.

    Ctrl-C stops it cleanly; the same command goes on. Runs that are finished are never repeated.
    """
    from sb3_td3x.runs.study import attempt, driver, grid
    from sb3_td3x.runs.study.folder import StudyFolder

    place = (out or Path("studies") / file.stem).resolve()
    folder = StudyFolder.at(place)
    runs = grid.read(file, attempt.OPTIONS)
    try:
        attempt.check(runs, folder)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    runner = _runner(ray, jobs, runs[0].options.get("threads", 1))
    console = Console(highlight=False, markup=False)
    table = RunsTable(runs, folder)
    count = f"{len(runs)} run{'' if len(runs) == 1 else 's'}"
    console.print(f"{count}, done before: {table.count('done')} → {place}", soft_wrap=True)
    for number in (signal.SIGINT, signal.SIGTERM):  # SIGINT too: a shell lets its background jobs ignore it
        signal.signal(number, signal.default_int_handler)
    live = Live(get_renderable=table.render, console=console, refresh_per_second=1) if console.is_terminal else None
    try:
        with live or nullcontext(), closing(driver.drive(runs, folder, attempt.train_td3x, runner)) as outcomes:
            for outcome in outcomes:
                table.outcomes[outcome.run] = outcome
                if live is None:
                    console.print(table.line(outcome), soft_wrap=True)
    except KeyboardInterrupt:
        console.print("stopped; runs under way have saved a checkpoint")
    folder.write_summary(runs, place / "summary.csv")
    _report(console, table, place / "summary.csv")


def _runner(ray: str | None, jobs: int | None, threads: int) -> "Runner":
    from sb3_td3x.runs.study import runners

    if ray is not None:
        return runners.on_ray(ray, jobs, threads)
    return runners.local(jobs or runners.jobs_here(threads))


def _report(console: Console, table: "RunsTable", summary: Path) -> None:
    """What the study came to; exit code 1 unless every run is finished."""
    for outcome in table.outcomes.values():
        if outcome.error:
            console.print(f"{outcome.run.name} failed: {outcome.error}", soft_wrap=True)
            console.print(f"  see {table.folder.printed(outcome.run)}", soft_wrap=True)
    done = table.count("done")
    console.print(f"{done} of {len(table.runs)} runs are done → {summary}", soft_wrap=True)
    if done < len(table.runs):
        console.print("the same command tries the others again")
        raise typer.Exit(1)


class RunsTable:
    """
    The runs of a study and how far they are.

    :param runs: all of them
    :param folder: where they write
    """

    def __init__(self, runs: "list[StudyRun]", folder: "StudyFolder"):
        from sb3_td3x.runs.study.attempt import experiment_of

        self.runs, self.folder = runs, folder
        self.totals = {run: experiment_of(run).hyperparameters()["n_timesteps"] for run in runs}
        self.outcomes: dict[StudyRun, Outcome] = {}
        self._done: dict[StudyRun, Progress] = {}  # which does not change any more

    def progress(self, run: "StudyRun") -> "Progress":
        from sb3_td3x.runs.study.watch import progress

        if run in self._done:
            return self._done[run]
        found = progress(run, self.folder)
        if found.state == "done":
            self._done[run] = found
        elif run in self.outcomes and self.outcomes[run].error:
            found = replace(found, state="failed")
        return found

    def count(self, state: str) -> int:
        return sum(self.progress(run).state == state for run in self.runs)

    def line(self, outcome: "Outcome") -> str:
        """One run's outcome in words."""
        from sb3_td3x.results.scores import score_text

        found = self.progress(outcome.run)
        score = "no score yet" if found.score is None else f"score {score_text(found.score)}"
        return f"{outcome.run.name}: {found.state} at {found.steps:,} of {self.totals[outcome.run]:,} steps, {score}"

    def render(self) -> Table:
        """Those at work first: a study may have more runs than a terminal has lines."""
        from sb3_td3x.results.scores import score_text

        found = {run: self.progress(run) for run in self.runs}
        counts = Counter(one.state for one in found.values())
        table = Table(title=", ".join(f"{counts[state]} {state}" for state in STATES if counts[state]), title_justify="left")
        for column in ("setting", "environment", "seed", "steps", "steps/s", "score", "state"):
            table.add_column(column, justify="left" if column in ("setting", "environment", "state") else "right")
        for run, one in sorted(found.items(), key=lambda pair: STATES.index(pair[1].state)):
            rate = "" if one.rate is None else f"{one.rate:.0f}"
            score = "" if one.score is None else score_text(one.score)
            steps = f"{one.steps:,}/{self.totals[run]:,}"
            table.add_row(run.setting, run.env, str(run.seed), steps, rate, score, one.state)
        return table


STATES = ("running", "failed", "stopped", "waiting", "done")
