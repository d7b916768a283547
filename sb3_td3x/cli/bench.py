"""``td3x bench``: how fast updates are on this machine."""

import json
import platform
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table


def command(
    batch: Annotated[int, typer.Option(help="transitions per update")] = 256,
    net: Annotated[str, typer.Option(help="hidden layers")] = "400,300",
    observations: Annotated[int, typer.Option(help="numbers in an observation")] = 22,
    actions: Annotated[int, typer.Option(help="numbers in an action")] = 6,
    critics: Annotated[int, typer.Option(help="number of critics")] = 2,
    quantiles: Annotated[int, typer.Option(help="measure also critics of so many quantiles")] = 1,
    embedding_dim: Annotated[int | None, typer.Option(help="measure also state-action embeddings of so many numbers")] = None,
    buffer: Annotated[int, typer.Option(help="transitions in the replay buffer")] = 100_000,
    threads: Annotated[int, typer.Option(help="torch threads")] = 1,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "cpu",
    repeats: Annotated[int, typer.Option(help="turns of each contender")] = 11,
    out: Annotated[Path | None, typer.Option(help="write the figures as JSON")] = None,
) -> None:
    """Measure updates: TD3X's paths beside SB3's TD3 (and SBX's, if installed). A minute or two."""
    import torch as th
    from stable_baselines3.common.utils import get_device

    from sb3_td3x.common import files
    from sb3_td3x.common.validation import whole
    from sb3_td3x.runs import speed
    from sb3_td3x.runs.experiment import require_device
    from sb3_td3x.td3x.policies import checked_embedding_dim
    from sb3_td3x.td3x.precision import processor

    require_device(device)
    device = get_device(device).type
    sizes = {"batch_size": batch, "observations": observations, "actions": actions}
    sizes |= {"n_critics": critics, "buffer_size": buffer, "n_quantiles": quantiles}
    layers = tuple(whole("net", part, minimum=1) for part in map(_number, net.split(",")))
    numbers = {name: whole(name, value, minimum=1) for name, value in sizes.items()}
    case = speed.Case(net_arch=layers, embedding_dim=checked_embedding_dim(embedding_dim), **numbers)
    th.set_num_threads(whole("threads", threads, minimum=1))
    whole("repeats", repeats, minimum=1)
    if out is not None:
        files.require_writable(out)
    console = Console()
    console.print(f"batch {batch}, net {net}, threads {threads}, {device}; compiling first …")
    rows = speed.summary(speed.compare(case, device, repeats))
    console.print(_table(rows))
    if out is not None:
        facts = {"processor": processor(), "python": platform.python_version(), "torch": th.__version__}
        figures = {**facts, "threads": threads, "device": device, "case": vars(case), "rows": rows}
        files.write(out, f"{json.dumps(figures, indent=1)}\n".encode())


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"--net needs layer sizes such as 400,300, not {text!r}") from None


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=None, header_style="bold")
    table.add_column("one update")  # in a narrow terminal names are broken, numbers are not
    for heading in ("ms", "fastest", "slowest", "times SB3", "share of floor"):
        table.add_column(heading, justify="right", min_width=max(map(len, heading.split())))
    for row in rows:
        table.add_row(
            row["name"], f"{row['ms']:.2f}", f"{row['fastest']:.2f}", f"{row['slowest']:.2f}",
            f"{row['times_sb3']:.2f}", f"{row['share_of_floor']:.0%}",
        )  # fmt: skip
    return table
