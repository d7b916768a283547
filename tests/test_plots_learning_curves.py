"""``td3x plot``: what is read, what is drawn of it, and what is said when that cannot be."""

import os
import shutil
import tracemalloc

import numpy as np
import pytest
from results_figures import interquartile_mean
from scipy import stats

from sb3_td3x.results import plots, scores
from sb3_td3x.results.run_dir import SCORES, RunDir

HEAD = "algo,setting,env,seed,timesteps,mean_return,std_return,wall_seconds"


def table(path, env="Hopper-v0", seed=0, setting="default", values=(1, 3, 5), every=100, pace=2.0):
    lines = [f"td3x,{setting},{env},{seed},{i * every},{value},0.5,{i * pace}" for i, value in enumerate(values, 1)]
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join([HEAD, *lines]) + "\n")
    return path


def evaluated(out, seed, config=None, **arguments):
    """A run's folder with one evaluation."""
    run = RunDir.create(out, "Hopper-v0")
    arguments = {"algo": "td3x", "preset": "default", "env": "Hopper-v0", "seed": seed, **arguments}
    run.write_settings(config or {"tau": 0.005}, arguments)
    np.savez(run.evaluations, timesteps=[1], results=[[float(seed)]])
    return run


class TestReading:
    def test_a_table_and_a_folder_of_tables(self, tmp_path):
        first, second = table(tmp_path / "a.csv"), table(tmp_path / "b.csv", seed=1)
        (run,) = scores.read([first])
        assert (run.label, run.env_id, run.seed) == ("TD3X default", "Hopper-v0", 0)
        assert (run.steps.tolist(), run.mean.tolist(), run.seconds.tolist()) == ([100, 200, 300], [1, 3, 5], [2, 4, 6])
        assert [found.seed for found in scores.read([tmp_path, second])] == [0, 1]  # named twice, counts once

    def test_a_preset_of_ones_own_counts_as_one_from_wherever_its_runs_were_started(self, tmp_path):
        runs = [evaluated(tmp_path, seed, preset=preset) for seed, preset in enumerate(["mine.yml", "/home/me/mine.yml"])]
        assert [run.label for run in scores.read(run.path for run in runs)] == ["TD3X mine", "TD3X mine"]

    @pytest.mark.parametrize(
        ("score", "text"), [(-0.0146, "-0.0146"), (0.0, "0"), (93.46, "93.5"), (-145.4, "-145"), (2785.6, "2786")]
    )
    def test_small_scores_keep_their_digits(self, score, text):
        assert scores.score_text(score) == text

    def test_a_tables_lines_may_be_in_any_order(self, tmp_path):
        both = table(tmp_path / "a.csv").read_text(), table(tmp_path / "b.csv", seed=1).read_text().partition("\n")[2]
        head, *lines = "".join(both).splitlines()
        (tmp_path / "c.csv").write_text("\n".join([head, *sorted(lines, key=lambda line: line.split(",")[4]), ""]))
        (tmp_path / "twice.csv").write_text("\n".join([head, *lines, *lines[:3], ""]))
        with pytest.raises(ValueError, match=r"twice.csv holds more than one run of td3x, default, Hopper-v0, 0"):
            scores.read([tmp_path / "twice.csv"])
        runs = scores.read([tmp_path / "c.csv"])
        assert [(run.seed, run.steps.tolist()) for run in runs] == [(0, [100, 200, 300]), (1, [100, 200, 300])]

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ("a,b\n1,2\n", "no column algo"),
            (HEAD + "\n", "no scores yet"),
            (HEAD + "\ntd3x,d,E,0,1", "is no table"),
            (HEAD + "\ntd3x,d,E,0.5,1,2,3,4", "t.csv is no table of scores: seed must be a whole number"),
            ("", "no scores"),
        ],
        ids=["other columns", "no line", "a line cut off", "half a seed", "empty"],
    )
    def test_another_file_is_named(self, content, message, tmp_path, refused):
        (tmp_path / "t.csv").write_text(content)
        assert message in refused("plot", tmp_path / "t.csv")

    def test_a_folder_of_runs_and_a_runs_own_scores(self, tmp_path):
        runs = [evaluated(tmp_path / "logs", seed) for seed in range(2)]
        for folder in (tmp_path / "logs", tmp_path / "logs" / "td3x"):
            assert [run.seed for run in scores.read([folder])] == [0, 1]
        (run := runs[1].path / SCORES).write_text("timesteps,mean_return,std_return,wall_seconds\n")
        assert [run.seed for run in scores.read([run])] == [1]

    def test_runs_that_have_no_evaluation_yet_are_left_out_if_others_have_one(self, tmp_path):
        run, begun = evaluated(tmp_path, 3), evaluated(tmp_path, 4)
        begun.evaluations.unlink()
        for paths in ([tmp_path], [run.path, begun.path]):
            assert [found.seed for found in scores.read(paths)] == [3]

    def test_a_run_that_may_not_be_read_is_named(self, tmp_path, monkeypatch):
        runs = [evaluated(tmp_path, seed).path for seed in range(2)]
        monkeypatch.setattr(os, "access", lambda path, mode: path != runs[0])
        with pytest.warns(UserWarning, match=f"{runs[0]} cannot be read and is left out"):
            scores.read([tmp_path])

    def test_a_table_that_a_spreadsheet_has_saved(self, tmp_path):
        text = table(tmp_path / "a.csv").read_text()
        (tmp_path / "a.csv").write_text(text, encoding="utf-8-sig")  # with the mark at its start
        assert len(scores.read([tmp_path / "a.csv"])) == 1

    def test_the_tables_of_a_studys_removed_runs_count_and_its_summary_does_not(self, tmp_path):
        for seed in range(2):
            table(tmp_path / "returns" / f"td3x_default_Hopper-v0_s{seed}.csv", seed=seed)
        table(tmp_path / "summary.csv", values=(5,))
        table(tmp_path / "returns" / ".td3x_default_Hopper-v0_s2.0123.partial.csv", seed=2)  # of a process that was killed
        evaluated(tmp_path, 0).path.rename((tmp_path / "runs").mkdir() or tmp_path / "runs" / "td3x_default_Hopper-v0_s0")
        found = sorted(scores.read([tmp_path]), key=lambda run: run.seed)
        assert [(run.seed, run.steps.tolist()) for run in found] == [(0, [1]), (1, [100, 200, 300])]
        shutil.rmtree(tmp_path / "runs")
        assert [run.steps.tolist() for run in scores.read([tmp_path])] == [[100, 200, 300]] * 2

    def test_a_run_whose_settings_are_missing_is_named(self, tmp_path):
        run = evaluated(tmp_path, 0)
        shutil.rmtree(run.settings)
        (run.path / "0.monitor.csv").write_text("#{}\nr,l,t\n")
        with pytest.raises(ValueError, match=r"is not a run: it holds no settings \(<environment>/args\.yml"):
            scores.read([run.path])

    def test_runs_of_one_setting_and_one_seed_are_told(self, tmp_path):
        for _ in range(2):
            evaluated(tmp_path, 3)
        with pytest.warns(UserWarning, match="'TD3X default', 'Hopper-v0': 2 runs have seed 3 and count as different seeds"):
            scores.read(sorted((tmp_path / "td3x").iterdir()))

    def test_runs_that_differ_in_more_than_their_seed_are_lines_of_their_own(self, tmp_path):
        configs = [
            {"tau": 0.005},
            {"tau": 0.005},
            {"tau": 0.01, "n_envs": 2},
            {"tau": 0.005, "policy_kwargs": {"net_arch": [8]}},
            {"tau": 0.005},
        ]
        for seed, config in enumerate(configs):
            evaluated(tmp_path, seed, config, env_kwargs={"g": 1.0} if seed == 4 else None)
        runs = scores.read(sorted((tmp_path / "td3x").iterdir()))
        assert [run.label for run in runs] == [
            "TD3X default tau=0.005",
            "TD3X default tau=0.005",
            "TD3X default tau=0.01 n_envs=2",
            "TD3X default tau=0.005 policy_kwargs.net_arch=[8]",
            "TD3X default tau=0.005 env_kwargs.g=1.0",
        ]

    def test_a_run_without_evaluations_says_when_the_first_comes(self, tmp_path, refused):
        (tmp_path / "run" / "E-v0").mkdir(parents=True)
        (tmp_path / "run" / "E-v0" / "args.yml").write_text("algo: td3x\nenv: E-v0\neval_freq: 5000\n")
        assert "no evaluations yet: the first comes after 5000 steps" in refused("plot", tmp_path / "run")


class TestCurves:
    def test_over_steps_is_the_mean_over_seeds_with_its_interval(self, tmp_path):
        runs = scores.read([table(tmp_path / f"{seed}.csv", seed=seed, values=(seed, 2 * seed, 7)) for seed in (0, 3, 6)])
        x, mean, low, high = plots.summary(runs)
        assert x.tolist() == [100, 200, 300]
        assert mean.tolist() == [3, 6, 7]
        # Of the 27 resamples of 0, 3, 6 the lowest mean is 0 and the highest 6, each with probability 1/27 > 2.5 %
        assert (low[0], high[0]) == (0, 6)
        assert (low[2], high[2]) == (7, 7)

    def test_ends_where_the_shortest_run_ends(self, tmp_path):
        runs = scores.read([table(tmp_path / "a.csv"), table(tmp_path / "b.csv", seed=1, values=(1, 1, 1, 9))])
        assert plots.summary(runs)[0].tolist() == [100, 200, 300]

    def test_over_time_a_score_between_two_evaluations_is_on_the_line_between_them(self, tmp_path):
        slow, fast = table(tmp_path / "a.csv", pace=4.0, values=(0, 4)), table(tmp_path / "b.csv", pace=3.0, values=(6, 0, 6))
        x, mean, _, _ = plots.summary(scores.read([slow, fast]), "time")
        assert (x * 60).tolist() == [4, 6, 8]  # evaluated at 4, 8 and at 3, 6, 9 seconds, drawn in minutes
        np.testing.assert_allclose(mean, [(0 + 4) / 2, (2 + 0) / 2, (4 + 4) / 2])

    def test_of_many_runs_at_times_of_their_own_need_little_memory(self, tmp_path):
        values = np.arange(100)
        for seed in range(10):
            table(tmp_path / f"{seed}.csv", seed=seed, values=values, pace=2 + seed / 100)
        runs = scores.read([tmp_path])
        tracemalloc.start()
        x, *_ = plots.summary(runs, "time")
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert len(x) > 800
        assert most < 40e6  # bytes; all resampled scores at once would take 70 MB

    def test_one_run_has_the_spread_over_its_episodes(self, tmp_path):
        _, _, low, high = plots.summary(scores.read([table(tmp_path / "a.csv")]))
        assert (high - low).tolist() == [1, 1, 1]

    def test_a_panel_per_environment_and_axis_and_a_line_per_setting(self, tmp_path):
        for env in ("A-v0", "B-v0"):
            for setting in ("one", "two"):
                table(tmp_path / f"{env}{setting}.csv", env, setting=setting)
        picture = plots.figure(scores.read([tmp_path]), ("steps", "time"))
        assert [axes.get_title("left") for axes in picture.axes] == ["A-v0", "B-v0"] * 2
        assert [axes.get_xlabel() for axes in picture.axes][1:3] == ["environment steps", "wall-clock time"]
        assert picture.axes[2].xaxis.get_major_formatter()(0.05, 0) == "3 s"  # six seconds in all
        assert all(len(axes.lines) == 2 for axes in picture.axes)
        assert "one standard deviation" in picture.get_supxlabel()

    def test_are_written_over_both_axes_one_below_the_other(self, tmp_path, heard):
        heard("plot", table(tmp_path / "a.csv"), "--x", "both", "--out", tmp_path / "c.png")
        import matplotlib.image

        picture = matplotlib.image.imread(tmp_path / "c.png")
        assert picture.shape[0] > picture.shape[1]
        assert picture.std() > 0.03

    @pytest.mark.parametrize("gap", [float("nan"), float("inf")])
    def test_a_score_between_gaps_is_seen(self, gap, tmp_path):
        picture = plots.figure(scores.read([table(tmp_path / "a.csv", values=(1, gap, 2))]))
        assert [line.get_marker() for line in picture.axes[0].lines] == ["o"]

    def test_a_long_legend_leaves_them_room(self, tmp_path):
        settings = [f"a-long-name-of-setting-number-{number}" for number in range(24)]
        runs = [table(tmp_path / f"{name}.csv", setting=name) for name in settings]
        (picture := plots.figure(scores.read(runs))).draw_without_rendering()
        panel, legend = picture.axes[0].get_window_extent(), picture.legends[0].get_window_extent()
        assert panel.y1 < legend.y0
        assert panel.height > 250

    def test_without_times_say_so(self, tmp_path):
        one = scores.read([table(tmp_path / "a.csv", pace=float("nan"))])
        with pytest.raises(ValueError, match=r"has no wall_seconds: .*--x steps"):
            plots.figure(one, ("time",))

    def test_names_are_text_and_no_formula(self, tmp_path):
        plots.draw(scores.read([table(tmp_path / "a.csv", env=r"$\nonsense{$")]), tmp_path / "c.svg")


def test_the_interquartile_mean_of_the_results_is_scipys_and_its_interval_that_of_a_bootstrap_over_both_seeds():
    random = np.random.default_rng(0)
    ours, theirs = random.normal(3, size=(3, 5)), random.normal(10, size=(3, 2))
    mean, low, high = interquartile_mean(list(ours), list(theirs))
    assert mean == pytest.approx(stats.trim_mean((ours / theirs.mean(axis=1, keepdims=True)).ravel(), 0.25))
    drawn = []
    for _ in range(4000):
        left, right = (np.stack([random.choice(row, len(row)) for row in part]) for part in (ours, theirs))
        drawn.append(stats.trim_mean((left / right.mean(axis=1, keepdims=True)).ravel(), 0.25))
    np.testing.assert_allclose([low, high], np.percentile(drawn, [2.5, 97.5]), atol=0.01)


def test_a_runs_spread_is_the_deviation_over_its_episodes(tmp_path):
    np.savez((run := evaluated(tmp_path, 0)).evaluations, timesteps=[1], results=[[0.0, 4.0]])
    assert scores.of_run(run).spread.tolist() == [2]


def test_the_band_reaches_the_best_run_and_the_legend_counts_the_runs_of_each_task(tmp_path):
    runs = [
        table(tmp_path / f"{e}{s}.csv", e, s, values=(s, 2))
        for e, s in (("A-v0", 0), ("A-v0", 3), ("B-v0", 0), ("B-v0", 1), ("B-v0", 2))
    ]
    picture = plots.figure(scores.read(runs))
    assert [text.get_text() for text in picture.legends[0].get_texts()] == ["TD3X default, 2 to 3 runs"]
    assert picture.axes[0].collections[0].get_paths()[0].vertices[:, 1].max() == 3
