"""``td3x study``: what a file stands for, what is wrong with one, what it leaves behind, and that nothing is done twice."""

import csv
import io
import json
import os
import re
import shutil
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import yaml
from rich.console import Console

from sb3_td3x import presets
from sb3_td3x.cli.console import PlainConsole
from sb3_td3x.cli.study import RunsTable
from sb3_td3x.common.lock import RunLock
from sb3_td3x.results.run_dir import RunDir
from sb3_td3x.results.scores import TABLE_COLUMNS
from sb3_td3x.runs import experiment, runners
from sb3_td3x.runs.study import OPTIONS, Progress, StudyFolder, StudyRun, check, read, train_td3x
from tests.commands import stop_after
from tests.resuming import leave_lock
from tests.studies import SHORT, here, made, saved_steps, study
from tests.tools import Calls

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
GRID = {"envs": ["Pendulum-v1", "MountainCarContinuous-v0"], "runs": [{"setting": "default"}, {"setting": "slow"}]}


@pytest.fixture
def folder(tmp_path):
    return StudyFolder.at(tmp_path)


@pytest.fixture
def run(tmp_path):
    """The only run of a study."""
    return study(tmp_path / "s.yml", seeds=[0])[0]


def damaged_checkpoint(folder):
    """A checkpoint that cannot be read, of a run that has begun."""
    (folder / "checkpoint" / "td3x_0_steps").mkdir(parents=True)
    (folder / "checkpoint" / "td3x_0_steps" / "manifest.json").touch()


def stopped(steps, runs, path):
    """Make runs of a study that are stopped at this step."""
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, steps)
        return made(runs, path)


def shown(table, console=Console, width=100):
    terminal = console(width=width, file=io.StringIO())
    terminal.print(table.render())
    return terminal.file.getvalue()


class TestFile:
    def test_stands_for_every_setting_environment_and_seed(self, tmp_path):
        runs = study(tmp_path / "s.yml", **GRID)
        assert [(run.setting, run.env, run.seed) for run in runs] == [
            (setting, env, seed) for setting in ("default", "slow") for env in GRID["envs"] for seed in (0, 1)
        ]
        assert runs[0].name == "td3x_default_Pendulum-v1_s0"
        assert study(tmp_path / "s.yml", preset="t3d", runs=[{}])[0].setting == "t3d"

    def test_a_settings_own_keys_win_and_its_overrides_are_added(self, tmp_path):
        own = {"setting": "one", "seeds": [7], "steps": 10, "overrides": {"batch_size": 4, "train_freq": [1, "episode"]}}
        (run,) = study(tmp_path / "s.yml", overrides={"batch_size": 8, "gamma": 0.9}, runs=[own])
        assert (run.seed, run.options["steps"], run.options["save_freq"]) == (7, 10, SHORT["save_freq"])
        settings = run.experiment().hyperparameters()
        assert (settings["batch_size"], settings["gamma"], settings["train_freq"]) == (4, 0.9, [1, "episode"])

    @pytest.mark.parametrize(
        ("common", "own", "result"),
        [
            ({"policy_kwargs.net_arch": [8]}, {"policy_kwargs": {"net_arch": [16]}}, {"net_arch": [16]}),
            ({"normalize.norm_reward": False}, {"normalize": False}, False),
        ],
    )
    def test_a_settings_own_whole_mapping_replaces_common_parts(self, common, own, result, tmp_path):
        (run,) = study(tmp_path / "s.yml", seeds=[0], overrides=common, runs=[{"setting": "one", "overrides": own}])
        assert run.experiment().hyperparameters()[next(iter(own))] == result

    def test_whole_mappings_come_before_their_parts_in_whatever_order_they_stand(self, tmp_path):
        both = {"policy_kwargs": {"net_arch": [8]}, "policy_kwargs.n_critics": 1}
        entries = [
            study(tmp_path / "s.yml", seeds=[0], overrides=dict(order))[0].experiment().hyperparameters()
            for order in (both.items(), reversed(both.items()))
        ]
        assert entries[0]["policy_kwargs"] == entries[1]["policy_kwargs"] == {"net_arch": [8], "n_critics": 1}

    def test_runs_are_on_the_cpu_unless_the_file_says_otherwise(self, tmp_path):
        assert study(tmp_path / "s.yml")[0].experiment().device == "cpu"
        assert study(tmp_path / "s.yml", device="auto")[0].experiment().device == "auto"

    @pytest.mark.parametrize("name", ["0.005", "64", 64, 0.005])
    def test_a_settings_name_may_be_a_number(self, name, tmp_path):
        (run,) = study(tmp_path / "s.yml", seeds=[0], envs=["Pendulum-v1"], runs=[{"setting": name}])
        assert run.name == f"td3x_{name}_Pendulum-v1_s0"

    def test_quoted_numbers_are_texts(self, tmp_path):
        (tmp_path / "s.yml").write_text("""
            envs: [Pendulum-v1]
            seeds: [0]
            env_kwargs: {quoted: ["1e5", "007", 'None'], plain: [1e5, 7, None]}
            runs: [{setting: "1e5"}]
        """)
        (run,) = read(tmp_path / "s.yml")
        assert run.experiment().env_kwargs == {"quoted": ["1e5", "007", "None"], "plain": [100_000, 7, None]}
        assert run.setting == "1e5"

    def test_numbers_are_written_as_for_the_command(self, tmp_path):
        text = "steps: 1e5\neval_freq: 2.5e3\nsave_freq: 1e4\nn_envs: 2\nthreads: 1e0\nseeds: [1e1]\n"
        (tmp_path / "s.yml").write_text(
            text + "envs: [Pendulum-v1]\noverrides: {action_noise: None}\nruns: [{setting: 1e5-steps}]"
        )
        (run,) = read(tmp_path / "s.yml")
        check([run], StudyFolder.at(tmp_path))
        made_of = run.experiment()
        assert (made_of.steps, made_of.eval_freq, made_of.save_freq, made_of.threads) == (100_000, 2_500, 10_000, 1)
        assert all(type(value) is int for value in (made_of.eval_freq, made_of.save_freq, made_of.threads, run.seed))
        assert made_of.hyperparameters()["action_noise"] is None

    @pytest.mark.skipif(not RESULTS.exists(), reason="results are not part of the source distribution")
    def test_the_benchmarks_files_list_runs_whose_scores_are_kept_and_have_their_lengths(self):
        options = (*OPTIONS, "arguments", "noise_std", "kernels")
        algorithms = ("td3x", "sb3_td3", "sb3_tqc", "sb3_crossq")
        files = [RESULTS.parent / f"{name}.yml" for name in ("returns", "candidates", "screening", "others")]
        steps = {run.name: run.options["steps"] for path in files for run in read(path, options, algorithms)}
        assert "sb3_td3_zoo_Walker2DBulletEnv-v0_s0" in steps
        for name in steps:
            *_, last = csv.DictReader((RESULTS / "returns" / f"{name}.csv").read_text().splitlines())
            assert steps[name] == int(last["timesteps"]), name

    @pytest.mark.parametrize(
        ("changes", "complaint"),
        [
            ({"runs": None}, "runs must be a list of settings"),
            ({"runs": [{"setting": "a/b"}]}, "setting must be a name of at most 50 letters"),
            ({"runs": [{"setting": "a" * 51}]}, "setting must be a name of at most 50 letters"),  # its files' names have ends
            ({"runs": [{"setting": "a"}, {"setting": "a"}]}, "two runs are named td3x_a_Pendulum-v1_s0"),
            ({"runs": [{"algo": "ddpg"}]}, "algo must be one of td3x, not 'ddpg'"),
            ({"eval_frequency": 3}, "there is no key 'eval_frequency': did you mean eval_freq?"),
            ({"seeds": []}, "seeds must be a list"),
            ({"runs": [{"setting": "LAP"}, {"setting": "lap"}]}, "two runs are named td3x_lap_Pendulum-v1_s0"),
            ({"seeds": [3, 0, 3]}, "two runs are named td3x_default_Pendulum-v1_s3"),
            ({"seeds": [-1]}, "seeds must be a whole number of at least 0"),
            ({"envs": ["Pendulm-v1"]}, "default, Pendulm-v1: there is no environment 'Pendulm-v1'"),
            ({"overrides": [1]}, "overrides must be a mapping"),
            ({"overrides": {"tau": 2}}, "tau must be a number between 0 and 1, not 2"),
            ({"steps": "many"}, "steps must be a whole number of at least 1"),
            ({"device": "tpu"}, "device on this machine must be one of auto, cpu"),
        ],
    )
    def test_what_is_wrong_is_one_line_that_names_file_and_key(self, changes, complaint, tmp_path, refused):
        path = tmp_path / "bad.yml"
        path.write_text(yaml.safe_dump({**SHORT, **changes}))
        printed = refused("study", path, "--out", tmp_path / "out")
        assert printed.startswith(f"error: {path}: ")
        assert complaint in printed
        assert printed.count("\n") == 1
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize("content", ["", "a: [", "!!python/object/apply:os.getcwd []", None])
    def test_what_is_no_study_file_is_said_in_one_line(self, content, tmp_path, refused):
        if content is not None:
            (tmp_path / "bad.yml").write_text(content)
        assert refused("study", tmp_path / "bad.yml").count("\n") == 1

    @pytest.mark.parametrize(
        "options", [["--ray", "local", "--jobs", 2], ["--only", 1, "--jobs", 2], ["--only", 1, "--ray", "local"]]
    )
    def test_jobs_ray_and_only_exclude_each_other(self, options, tmp_path, refused):
        study(tmp_path / "s.yml")
        printed = refused("study", tmp_path / "s.yml", *options, "--out", tmp_path / "out")
        assert "give one of --jobs, --ray and --only" in printed

    @pytest.mark.parametrize("address", ["127.0.0.1:9", "ray://127.0.0.1:9"])
    def test_a_cluster_that_does_not_answer_is_said_not_to(self, address):
        with pytest.raises(ValueError, match=f"no Ray cluster answers at {address}"):
            runners.on_ray(address)

    def test_ray_that_is_not_installed_says_what_to_install(self, tmp_path, monkeypatch, refused):
        monkeypatch.setitem(sys.modules, "ray", None)
        study(tmp_path / "s.yml")
        printed = refused("study", tmp_path / "s.yml", "--ray", "local", "--out", tmp_path / "out")
        assert printed.endswith(": pip install ray\n")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    path = tmp_path_factory.mktemp("study")
    runs = study(path / "s.yml", runs=[{"setting": "default"}, {"setting": "slow", "overrides": {"learning_rate": 1e-5}}])
    return path, runs, made(runs, path)


class TestResults:
    def test_every_run_has_a_table_of_its_scores(self, finished):
        path, runs, outcomes = finished
        assert all(outcome.is_finished for outcome in outcomes.values())
        for run in runs:
            rows = list(csv.DictReader((path / "returns" / f"{run.name}.csv").read_text().splitlines()))
            steps, returns = RunDir.open(StudyFolder.at(path).run(run)).scores()
            assert tuple(rows[0]) == TABLE_COLUMNS
            assert [int(row["timesteps"]) for row in rows] == steps.tolist() == [200, 400, 450]
            assert [float(row["mean_return"]) for row in rows] == pytest.approx(returns.mean(axis=1), abs=1e-3)
            seconds = [float(row["wall_seconds"]) for row in rows]
            assert seconds == sorted(seconds)
            assert {(row["setting"], row["env"], row["seed"]) for row in rows} == {(run.setting, run.env, str(run.seed))}

    def test_a_finished_run_whose_folder_was_removed_keeps_its_line(self, finished, folder, tmp_path):
        path, runs, _ = finished
        shutil.copytree(path / "returns", tmp_path / "returns")
        folder.write_summary(runs, tmp_path / "summary.csv")
        summary = (tmp_path / "summary.csv").read_text().splitlines()
        assert summary[0] == ",".join(TABLE_COLUMNS)
        assert summary[1:] == [(path / "returns" / f"{run.name}.csv").read_text().splitlines()[-1] for run in runs]
        assert folder.progress(runs[0]) == StudyFolder.at(path).progress(runs[0])
        check(runs, folder)
        folder.table(runs[1]).write_text(folder.table(runs[1]).read_text().replace(",", ";"))  # as a spreadsheet saves it
        assert folder.progress(runs[1]).score is None
        with pytest.raises(ValueError, match=rf"{runs[1].name}.csv has 0 steps, not 450: .* remove that table"):
            check(runs, folder)
        for steps in (900, 300, 200):
            changed = study(tmp_path / "s.yml", steps=steps)
            with pytest.raises(ValueError, match=rf"{runs[0].name}.csv has 450 steps, not {steps}: .* remove that table"):
                check(changed, folder)

    def test_a_finished_run_is_never_repeated_also_if_its_end_was_not_noted(self, finished):
        path, runs, _ = finished
        assert made(runs, path) == {}
        table = StudyFolder.at(path).table(runs[0])
        content = table.read_text()
        table.unlink()
        assert list(made(runs, path)) == [runs[0].name]
        assert table.read_text() == content

    def test_the_table_shows_states_steps_and_scores(self, finished):
        path, runs, _ = finished
        table = RunsTable([*runs, *study(path / "more.yml", seeds=[8, 9])], StudyFolder.at(path))
        failed = table.runs[-1]
        table.errors[failed] = "no luck"
        printed = shown(table)
        assert printed.startswith("1 failed, 1 waiting, 4 done")
        assert printed.count("450/450") == 4
        assert table.line(failed).endswith("failed at 0 of 450 steps, no score yet")

    def test_the_table_shows_names_as_they_are_and_obeys_none(self, folder):
        run = StudyRun("td3x", "[red]:fire:\x1b[2J", "Pendulum-v1", 0)
        assert r"[red]:fire:\x1b[2J" in shown(RunsTable([run], folder), PlainConsole)

    def test_a_narrow_table_keeps_its_numbers(self, folder):
        run = StudyRun("td3x", "a-long-name-of-a-setting", "HalfCheetahBulletEnv-v0", 0, {"steps": 500_000})
        assert " 0/500,000 " in shown(RunsTable([run], folder), width=60)

    def test_a_run_under_way_has_the_steps_and_the_rate_of_its_log(self, folder, run):
        folder.run(run).mkdir(parents=True)
        (folder.run(run) / "progress.csv").write_text("time/fps,time/total_timesteps\n31,120\n,\n32,240\n33")
        with RunLock(folder.run(run)):
            assert folder.progress(run) == Progress("running", 240, 32.0)
            assert re.search(r"1 running.*240/450 .* 32 .* running", shown(RunsTable([run], folder)), re.DOTALL)
        assert folder.progress(run).state == "waiting"


class TestResuming:
    def test_a_stopped_run_resumes_from_its_checkpoint(self, folder, run, tmp_path):
        assert not stopped(250, [run], tmp_path)[run.name].is_finished
        assert saved_steps(tmp_path, run)[-1] == 250
        found = folder.progress(run)
        assert (found.state, found.steps) == ("stopped", 250)
        assert made([run], tmp_path)[run.name].is_finished
        log = (folder.run(run) / "output.log").read_text()
        assert "at step 0 of 450" in log
        assert "at step 250 of 450" in log

    @pytest.mark.filterwarnings("error:nothing to do")
    def test_a_run_that_is_stopped_in_its_last_evaluation_makes_it_when_it_is_resumed(self, folder, tmp_path):
        (run,) = runs = study(tmp_path / "s.yml", seeds=[0], steps=449, overrides={"train_freq": 5})
        assert not stopped(450, runs, tmp_path)[run.name].is_finished
        assert saved_steps(tmp_path, run)[-1] == 450
        assert made(runs, tmp_path)[run.name].is_finished
        assert folder.table(run).read_text().splitlines()[-1].startswith("td3x,default,Pendulum-v1,0,450,")

    def test_a_run_that_is_killed_before_its_last_score_is_in_its_table_makes_it_again(self, folder, run, tmp_path):
        made([run], tmp_path)
        folder.table(run).unlink()
        scores = folder.run(run) / "scores.csv"
        scores.write_text("\n".join([*scores.read_text().splitlines()[:-1], ""]))
        assert made([run], tmp_path)[run.name].is_finished
        assert folder.table(run).read_text().splitlines()[-1].startswith("td3x,default,Pendulum-v1,0,450,")

    def test_what_was_left_before_the_first_checkpoint_starts_again(self, folder, run, tmp_path):
        remains = folder.run(run) / "Pendulum-v1"
        remains.mkdir(parents=True)
        (remains / "args.yml").write_text("{algo: td3x, env: Pendulum-v1}")  # the first file that a run writes
        (remains.parent / "progress.csv").write_text("a,b\n1,2\n")
        by_hand = [
            remains.parent / name for name in ("notes.txt", "checkpoint/good/model.zip", "checkpoint/replay/expert.npz")
        ]
        for file in by_hand:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("by hand")
        assert made([run], tmp_path)[run.name].is_finished
        assert "a,b" not in (remains.parent / "progress.csv").read_text()
        assert all(file.read_text() == "by hand" for file in by_hand)

    def test_a_damaged_run_fails_alone_and_does_not_start_again(self, folder, tmp_path, monkeypatch, called_and_heard):
        runs = study(tmp_path / "s.yml", seeds=[0, 1, 2])
        stopped(120, runs, tmp_path)
        folders = [folder.run(run) for run in runs]
        for manifest in folders[0].glob("checkpoint/*/manifest.json"):
            manifest.unlink()
        (folders[1] / "Pendulum-v1" / "args.yml").write_text("[")
        check(runs, folder)
        outcomes = list(made(runs, tmp_path).values())
        assert "manifest.json is missing" in outcomes[0].error
        assert "args.yml cannot be read" in outcomes[1].error
        assert outcomes[2].is_finished
        monkeypatch.setattr(runners, "local", lambda jobs: here)
        code, printed = called_and_heard("study", tmp_path / "s.yml", "--out", tmp_path)
        assert (code, printed.out.count(" failed: ")) == (1, 2)
        assert "1 of 3 runs are done" in printed.out

    def test_a_run_that_was_extended_by_hand_does_not_keep_its_old_table(self, folder, run, tmp_path):
        made([run], tmp_path)
        experiment.train(experiment.resume(RunDir.open(folder.run(run)), 900))
        longer = study(tmp_path / "s.yml", seeds=[0], steps=900)
        with pytest.raises(ValueError, match=f"was extended since its table {folder.table(run)}: remove that"):
            check(longer, folder)
        folder.table(run).unlink()
        made(longer, tmp_path)
        assert folder.progress(run).steps == 900

    def test_a_run_that_was_extended_and_killed_before_it_saved_is_not_taken_for_finished(self, folder, run, tmp_path):
        made([run], tmp_path)
        with pytest.raises(OSError, match="killed"):
            experiment.train(
                experiment.resume(RunDir.open(folder.run(run)), 900), [Calls(Mock(side_effect=OSError("killed")))]
            )
        folder.table(run).unlink()
        made(study(tmp_path / "s.yml", seeds=[0], steps=900), tmp_path)
        assert folder.progress(run).steps == 900

    def test_a_changed_file_is_refused(self, folder, run, tmp_path, monkeypatch):
        stopped(120, [run], tmp_path)
        changed = study(tmp_path / "s.yml", seeds=[0], steps=900)
        with pytest.raises(ValueError, match=rf"{run.name} was begun with n_timesteps 450, not 900: .* remove that folder$"):
            check(changed, folder)
        made([run], tmp_path)
        table, checkpoints = folder.table(run), folder.run(run) / "checkpoint"
        for place in (checkpoints, tmp_path / "moved"):  # as to free the disk
            checkpoints.rename(place)
            with pytest.raises(ValueError, match=rf"remove that folder and its table {table}$"):  # else it counts as made
                check(changed, folder)
        place.rename(checkpoints)
        preset = {"Pendulum-v1": {**RunDir.open(folder.run(run)).config(), "tau": 0.125}}
        monkeypatch.setattr(presets, "load", lambda name, env: dict(preset[env]))
        with pytest.raises(ValueError, match=r"was begun with tau unset, not 0.125"):  # it was edited
            check([run], folder)
        monkeypatch.undo()
        moved = {"Pendulum-v1": {**presets.load("default", "Pendulum-v1")}}
        (tmp_path / "moved.yml").write_text(json.dumps(moved))
        check(study(tmp_path / "s.yml", seeds=[0], preset=str(tmp_path / "moved.yml")), folder)
        reordered = dict(reversed(SHORT["overrides"].items()))
        check(study(tmp_path / "s.yml", seeds=[0], overrides=reordered), folder)
        inside = {**SHORT["overrides"], "policy_kwargs.n_critics": 1}
        with pytest.raises(ValueError, match=r"was begun with policy_kwargs .*, not .*'n_critics': 1"):
            check(study(tmp_path / "s.yml", seeds=[0], overrides=inside), folder)

    def test_a_run_without_noise_is_not_one_with_the_default_noise(self, folder, tmp_path):
        (silent,) = study(tmp_path / "s.yml", seeds=[0], overrides={**SHORT["overrides"], "action_noise": None})
        experiment.prepare(silent.experiment(), folder.run(silent)).resources.close()
        damaged_checkpoint(folder.run(silent))
        with pytest.raises(ValueError, match="was begun with action_noise None, not unset"):
            check(study(tmp_path / "s.yml", seeds=[0]), folder)

    def test_a_line_of_scores_that_was_cut_off_is_none(self, folder, run):
        folder.run(run).mkdir(parents=True)
        for line in ("200", "200,-500.6,"):
            (folder.run(run) / "scores.csv").write_text(f"timesteps,mean_return,std_return,wall_seconds\n{line}")
            assert folder.progress(run).score is None

    @pytest.fixture
    def begun(self, folder, run):
        experiment.prepare(run.experiment(), folder.run(run)).resources.close()
        damaged_checkpoint(folder.run(run))

    @pytest.mark.usefixtures("begun")
    def test_steps_that_are_those_of_the_preset_need_not_be_written(self, folder, tmp_path, monkeypatch):
        load = presets.load
        monkeypatch.setattr(presets, "load", lambda name, env: {**load(name, env), "n_timesteps": SHORT["steps"]})
        check(study(tmp_path / "s.yml", seeds=[0], steps=None), folder)

    @pytest.mark.usefixtures("begun")
    def test_an_edit_that_is_no_hyperparameter_is_refused_too(self, folder, tmp_path):
        with pytest.raises(ValueError, match="was begun with eval_episodes 1, not 3"):
            check(study(tmp_path / "s.yml", seeds=[0], eval_episodes=3), folder)

    def test_a_run_that_fails_leaves_the_others_alone_and_says_why(self, folder, tmp_path):
        def train(run, path):
            if run.seed == 0:
                raise ValueError("seed 0\nbrings no luck\n")
            return train_td3x(run, path)

        runs = study(tmp_path / "s.yml")
        outcomes = made(runs, tmp_path, train=train)
        assert outcomes[runs[0].name].error == "seed 0\nbrings no luck\n"
        assert outcomes[runs[1].name].is_finished
        assert "Traceback" in folder.printed(runs[0]).read_text()

    def test_a_strangers_run_writes_nothing_elsewhere(self, folder, run, tmp_path):
        folder.run(run).mkdir(parents=True)
        (tmp_path / "mine").write_text("my work\n")
        folder.printed(run).symlink_to(tmp_path / "mine")
        assert "is a link" in made([run], tmp_path)[run.name].error
        assert (tmp_path / "mine").read_text() == "my work\n"


class TestOnly:
    """One run of a study as one job of a scheduler."""

    def test_makes_the_run_of_this_number_and_no_other(self, folder, tmp_path, heard):
        first, second = study(tmp_path / "s.yml", steps=250)
        for _ in range(2):  # a job that is started again finds it finished
            heard("study", tmp_path / "s.yml", "--only", 1, "--out", tmp_path)
        assert folder.is_finished(second)
        assert not folder.run(first).exists()
        assert (tmp_path / "summary.csv").read_text().count("\n") == 2
        assert (folder.run(second) / "output.log").read_text().count("at step 0 of 250") == 1

    def test_of_a_file_that_was_edited_between_two_jobs_is_refused(self, tmp_path, heard, refused):
        study(tmp_path / "s.yml", steps=250)
        heard("study", tmp_path / "s.yml", "--only", 1, "--out", tmp_path)
        study(tmp_path / "s.yml", steps=250, overrides={**SHORT["overrides"], "tau": 0.125})
        assert "was begun with tau" in refused("study", tmp_path / "s.yml", "--only", 0, "--out", tmp_path)

    def test_of_a_run_that_fails_has_its_line_in_the_summary(self, tmp_path, monkeypatch, refused):
        study(tmp_path / "s.yml", seeds=[0], steps=250, eval_freq=100)
        monkeypatch.setattr("sb3_td3x.TD3X.train", Mock(side_effect=[*[None] * 110, ValueError("no luck")]))
        assert "no luck" in refused("study", tmp_path / "s.yml", "--only", 0, "--out", tmp_path)
        assert "td3x,default,Pendulum-v1,0," in (tmp_path / "summary.csv").read_text()

    def test_of_another_number_is_refused_with_those_there_are(self, tmp_path, refused):
        study(tmp_path / "s.yml")
        printed = refused("study", tmp_path / "s.yml", "--only", 2, "--out", tmp_path)
        assert "has 2 runs: --only can be 0 to 1, not 2" in printed


def test_a_run_whose_lock_was_left_is_not_under_way(folder, run):
    folder.run(run).mkdir(parents=True)
    leave_lock(folder.run(run))
    os.utime(folder.run(run) / "lock", times=(0, 0))
    assert folder.progress(run).state == "waiting"


def test_a_stopped_run_with_arguments_of_its_environment_resumes(tmp_path):
    (run,) = runs = study(tmp_path / "s.yml", seeds=[0], env_kwargs={"g": 5})
    stopped(120, runs, tmp_path)
    assert made(runs, tmp_path)[run.name].is_finished


def test_a_strangers_folder_of_a_run_leads_nowhere_else(folder, run, tmp_path):
    folder.run(run).mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (folder.run(run) / "Pendulum-v1").symlink_to(tmp_path / "elsewhere")
    assert "leads out of the run's folder" in made([run], tmp_path)[run.name].error
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_run_of_several_threads_takes_as_many_cores(tmp_path, monkeypatch, called):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    assert [runners.jobs_here(threads) for threads in (1, 3, 16)] == [8, 2, 1]
    asked = []
    monkeypatch.setattr(runners, "local", lambda jobs: asked.append(jobs) or (lambda *_: iter(())))
    study(tmp_path / "s.yml", runs=[{"setting": "a"}, {"setting": "b", "threads": 4}])
    called("study", tmp_path / "s.yml", "--out", tmp_path / "out")
    assert asked == [2]
