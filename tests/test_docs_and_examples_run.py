"""Every Python block of README and docs runs, every example and notebook runs, commands and links shown are there."""

import importlib
import json
import re
import runpy
import shlex
import subprocess
import sys
import webbrowser
from hashlib import sha256
from pathlib import Path

import nbclient
import nbformat
import numpy as np
import pytest
import torch
import typer
from sb3_contrib.common.torch_layers import BatchRenorm
from scipy import stats
from stable_baselines3.common.save_util import load_from_pkl

from sb3_td3x import NonFiniteError, cli
from sb3_td3x.results.run_dir import RunDir
from sb3_td3x.runs import experiment, play, study
from tests.commands import stop_after

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
AGENTS = sorted(path for path in (ROOT / "agents").iterdir() if path.is_dir())
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
with_results = pytest.mark.skipif(
    not (ROOT / "benchmarks" / "results").exists(), reason="results are not part of the source distribution"
)
STEPS = 200  # blocks and examples are run with this many steps instead of those they show
ELSEWHERE = {"walk_without_torch.py", "demo.py", "search.py", "resume.py"}  # tests of their own run them


def blocks(language):
    return [
        (f"{page.name}-{number}", content)
        for page in PAGES
        for number, (kind, content) in enumerate(BLOCK.findall(page.read_text()))
        if kind == language
    ]


def with_few_steps(code):
    """Replace the numbers of steps in the shown code by ``STEPS``, those of random steps and of episodes by less."""
    fewer = {".learn(": STEPS, "steps = ": STEPS, "learning_starts=": 100, "episodes=": 2}
    return re.sub(rf"({'|'.join(map(re.escape, fewer))})[\d_.e]{{2,}}", lambda found: f"{found[1]}{fewer[found[1]]}", code)


@pytest.mark.parametrize("code", [pytest.param(code, id=name) for name, code in blocks("python")])
def test_python_blocks(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAY_ADDRESS", "local")  # not a cluster that another test runs
    monkeypatch.setenv("RAY_worker_niceness", "0")  # Ray's 15 starves its workers where other tests run beside this one
    exec(compile(with_few_steps(code), "block", "exec"), {})  # noqa: S102
    if "ray" in sys.modules:
        sys.modules["ray"].shutdown()


def test_shown_commands_exist():
    makefile = (ROOT / "Makefile").read_text()
    commands = typer.main.get_command(cli.app).commands
    for line in "\n".join(code for _, code in blocks("sh")).splitlines():
        words = shlex.split(line, comments=True)
        if not words or words == ["td3x", "--help"]:
            continue
        if words[0] == "make":
            for word in words[1:]:
                if "=" in word:
                    assert re.search(rf"^{word.partition('=')[0]} \?=", makefile, re.MULTILINE), word
                else:
                    assert re.search(rf"^{word}:", makefile, re.MULTILINE), word
        elif words[0] == "td3x":
            known = {name for parameter in commands[words[1]].params for name in (*parameter.opts, *parameter.secondary_opts)}
            assert {word for word in words if word.startswith("--")} <= {*known, "--help"}, line
        else:
            assert words[0] in {"pip", "git", "cd", "python", "nox"}, line
            assert all((ROOT / word).exists() for word in words if word.startswith(("benchmarks/", "examples/"))), line


@pytest.fixture
def example(tmp_path, monkeypatch):
    """Runs one where a user works, as ``python NAME ARGUMENTS`` does; its globals."""
    monkeypatch.chdir(tmp_path)

    def run(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        return runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")

    return run


@pytest.mark.parametrize("path", [path for path in EXAMPLES if path.name not in ELSEWHERE], ids=lambda path: path.name)
def test_examples(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len(path.read_text().splitlines()) <= 50
    copy = tmp_path / path.name
    copy.write_text(with_few_steps(path.read_text()))
    runpy.run_path(str(copy), run_name="__main__")
    assert list(tmp_path.glob("*.zip")), "the example saves its model"


@with_results
def test_every_table_shows_what_the_raw_files_say(tmp_path, monkeypatch):
    import figures

    written = []
    monkeypatch.setattr(Path, "write_text", lambda path, text: written.append((path, text)))
    monkeypatch.setattr(figures, "STATIC", tmp_path)
    monkeypatch.setattr(sys, "argv", ["figures.py"])
    figures.main()
    assert len({path for path, _ in written}) == 8
    for path, text in written:
        assert text == path.read_text(), "`python benchmarks/figures.py` renews it"


@with_results
def test_sentences_about_the_results_hold_the_numbers_of_the_raw_files():
    from results import runs
    from results_figures import ACTORS, DEFAULT, ENVIRONMENTS, SB3_TD3, SB3_TQC, ends, short

    found, page = runs(), " ".join((ROOT / "docs" / "results.md").read_text().split())
    intervals = {SB3_TD3: [], SB3_TQC: []}
    for env in ENVIRONMENTS:
        for rival, theirs in ((rival, ends(found, rival, env)) for rival in intervals):
            ours = ends(found, DEFAULT, env)
            low, high = stats.ttest_ind(ours, theirs, equal_var=False).confidence_interval()
            intervals[rival].append(f"{(low + high) / 2:.0f} ± {(high - low) / 2:.0f}")
            assert rival == SB3_TQC or f"{100 * (np.mean(ours) / np.mean(theirs) - 1):+.0f} % ({short(env)})" in page
    assert f"Welch's 95 % intervals of the differences from SB3's TD3 hold 0: {', '.join(intervals[SB3_TD3])}." in page
    assert f"From TQC they are {', '.join(intervals[SB3_TQC])}." in page
    assert f"ended at {ends(found, ('sb3_crossq', 'zoo'), ENVIRONMENTS[0])[0]:.0f} on HalfCheetah" in page

    returns = [json.loads(path.read_text())["returns"] for path in ACTORS.glob("*.json")]
    losses = [np.mean(actors["best by evaluations"]) - np.mean(actors["live"]) for actors in returns]
    assert f"in {sum(loss <= 70 for loss in losses)} of {len(losses)} runs" in page


@with_results
def test_the_rivals_compiled_layer_makes_the_sums_of_its_own():
    from returns import batch_renorm

    torch.manual_seed(0)
    own, ours = BatchRenorm(3, warmup_steps=4), BatchRenorm(3, warmup_steps=4)
    for _ in range(8):  # five of them in its warm-up
        batch = torch.randn(16, 3) * torch.tensor([0.1, 1, 9]) + torch.tensor([0, 1, 30])  # the second column is not clipped
        inputs = [batch.clone().requires_grad_() for _ in range(2)]
        outputs = own(inputs[0]), batch_renorm(ours, inputs[1])
        weights = torch.randn(16, 3)
        gradients = [torch.autograd.grad((output * weights).sum(), one) for output, one in zip(outputs, inputs, strict=True)]
        torch.testing.assert_close(outputs[1], outputs[0])
        torch.testing.assert_close(gradients[1], gradients[0])
    torch.testing.assert_close(ours.state_dict(), own.state_dict())
    torch.testing.assert_close(batch_renorm(ours.eval(), batch), own.eval()(batch))


def test_an_interrupted_example_resumes(tmp_path, example, capsys):
    (tmp_path / "resumable" / "replay").mkdir(parents=True)  # of a process that was killed before its first checkpoint
    for steps in (200, 400):
        end = example("resume.py", "--steps", steps)
    assert "resumed after 200 steps" in capsys.readouterr().out
    assert end["model"].num_timesteps == 400
    assert (tmp_path / "pendulum_resumable.zip").exists()


def test_ctrl_c_ends_the_search(tmp_path, monkeypatch, example):
    stop_after(monkeypatch, 10)
    with pytest.raises(SystemExit, match="no trial was completed"):
        example("search.py", "--steps", 20, "--trials", 2)
    assert len(list((tmp_path / "logs" / "td3x").iterdir())) == 1


def test_a_trial_that_diverges_does_not_end_the_search(tmp_path, monkeypatch, example):
    def train_second(run, **kwargs):
        trials.append(run)
        if len(trials) == 1:
            run.resources.close()
            raise NonFiniteError("critic loss", "update 1")
        return train(run, **kwargs)

    trials, train = [], experiment.train
    monkeypatch.setattr(experiment, "train", train_second)
    end = example("search.py", "--steps", STEPS, "--trials", 2)
    assert [trial.state.name for trial in end["search"].trials] == ["FAIL", "COMPLETE"]
    assert (tmp_path / "best_of_search.zip").exists()


def test_the_demo_shows_the_walker_and_ends_with_a_report(monkeypatch, example, capsys):
    opened = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    example("demo.py", "--steps", 600)
    folder = Path("logs", "demo")
    assert min((folder / name).stat().st_size for name in ("walker.mp4", "walker.png")) > 20_000
    (report,) = (folder / "td3x").glob("Pendulum-v1_*/report.html")
    assert str(report) in capsys.readouterr().out
    assert opened == [report.resolve().as_uri()]


@pytest.mark.parametrize("agent", AGENTS, ids=lambda path: path.name)
def test_a_shipped_agent_is_what_its_checksums_say_and_plays_without_trust(agent):
    for line in (agent / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split("  ")
        assert sha256((agent / name).read_bytes()).hexdigest() == digest
    returns = play.evaluate(RunDir.open(agent), episodes=3, seed=0)  # other processors bring other episodes
    claimed = float(re.search(rf"\| {agent.name} \| (\d+)", (agent.parent / "README.md").read_text())[1])
    assert returns.mean() > 0.5 * claimed


@pytest.mark.soak
def test_the_robot_learns_to_reach(example):
    end = example("reach.py")
    assert end["success_rate"](end["model"], end["env"], 100) > 0.9


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebooks(path, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs for cell in code), "outputs are not kept"
    assert code[0].source.rpartition("\n")[2].startswith("%pip install")
    notebook.cells.remove(code[0])
    for cell in code:
        cell.source = with_few_steps(cell.source)
    nbclient.NotebookClient(notebook, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = "".join(output.get("text", "") for cell in code for output in cell.get("outputs", []))
    assert "return" in printed
    assert (tmp_path / "pendulum.zip").exists()
    assert load_from_pkl(tmp_path / "pendulum_replay.pkl").size() == STEPS


def test_links_and_pictures_are_there():
    link = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)|\{figure\} (\S+)|\{include\} (\S+)|<img src=\"([^\"]+)\"")
    for page in PAGES:
        for target in link.findall(page.read_text()):
            (path,) = filter(None, target)
            assert "://" in path or (page.parent / path).exists(), f"{page.name} -> {path}"


def test_tests_named_in_the_docs_exist():
    for page in PAGES:
        for name in set(re.findall(r"\btest_\w+", page.read_text())):
            assert (ROOT / "tests" / f"{name}.py").exists(), f"{page.name}: {name}"


def test_the_page_of_studies_names_every_key_of_their_file():
    page = (ROOT / "docs" / "experiments.md").read_text()
    assert [key for key in study.OPTIONS if f"`{key}`" not in page] == []


def test_the_algorithms_page_names_functions_that_exist():
    page = (ROOT / "docs" / "algorithm.md").read_text()
    named = set(re.findall(r"`(td3x|losses|gradient_step|critics|policies)\.([A-Z]?\w+)", page))
    assert len(named) > 10
    for module, name in named - {("critics", "py")}:
        assert hasattr(importlib.import_module(f"sb3_td3x.td3x.{module}"), name), f"{module}.{name}"


def test_every_feature_names_the_test_that_shows_it():
    """A cell of ours says that there is nothing, names a test, or has the actor's kind."""
    rows = [line.split(" | ") for line in (ROOT / "docs" / "features.md").read_text().splitlines() if line.startswith("| ")]
    own = {row[0].strip("| "): row[1] for row in rows if row[1] != "TD3X"}
    assert len(own) > 30
    assert [feature for feature, cell in own.items() if cell != "\u2013" and "`test_" not in cell] == ["actor"]


def test_no_page_shows_a_path_of_a_machine():
    assert not [page.name for page in PAGES if re.search(r"(?<![\w/.])/(home|root|work|tmp)/", page.read_text())]


def test_make_help_lists_the_targets():
    printed = subprocess.run(["make", "-s", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for target in re.search(r"^\.PHONY: help (.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split():
        assert re.search(rf"make .*\b{target}\b", printed), target
