"""Callbacks, evaluations and TensorBoard around a run that is resumed."""

import math
import warnings

import gymnasium as gym
import numpy as np
import pytest
from stable_baselines3.common.callbacks import (
    CallbackList,
    ConvertCallback,
    EveryNTimesteps,
    LogEveryNTimesteps,
    StopTrainingOnMaxEpisodes,
    StopTrainingOnNoModelImprovement,
)
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize
from tensorboard.summary.writer import event_file_writer

from sb3_td3x import TD3X, CheckpointError
from sb3_td3x.checkpoint import ResumableEnv, TD3XCheckpointCallback, callback_state, env_state, resume_run
from sb3_td3x.results.run_dir import RunDir
from tests.resuming import STEPS, OpenLineEnv, board_steps, evaluating, saved_steps, scoring, seeded
from tests.tools import Calls, LineEnv, model


class TestExactly:
    def callbacks(self, tmp_path):
        return [
            evaluating(25, n_eval_episodes=2, log_path=tmp_path, best_model_save_path=tmp_path),
            EveryNTimesteps(35, evaluating(1)),
            StopTrainingOnMaxEpisodes(1000),
            LogEveryNTimesteps(30),
            TD3XCheckpointCallback(50, tmp_path / "checkpoint", keep_last=9),
        ]

    @pytest.mark.filterwarnings("error:not restored exactly")
    def test_scores_counters_and_the_best_model_continue(self, tmp_path):
        whole = self.callbacks(tmp_path / "whole")
        model(seeded(), seed=1).learn(STEPS, whole)
        cut = self.callbacks(tmp_path / "cut")
        model(seeded(), seed=1).learn(STEPS, cut)
        (best := tmp_path / "cut" / "best_model.zip").write_bytes(b"")
        resumed = self.callbacks(tmp_path / "cut")
        run = resume_run(tmp_path / "cut" / "checkpoint", seeded(), checkpoint=60)
        seen = []

        def look(_):
            with np.load(tmp_path / "cut" / "evaluations.npz") as archive:
                seen.append((archive["timesteps"].tolist(), TD3X.load(best).num_timesteps in (25, 50)))

        run.learn(STEPS, [*resumed, Calls(look)], resume=True)
        assert seen[0] == ([25, 50], True)  # not what came after the checkpoint, and the best model again
        assert [callback.n_calls for callback in whole] == [callback.n_calls for callback in resumed]
        assert resumed[0].evaluations_timesteps == [25, 50, 75, 100]
        assert resumed[0].evaluations_results == whole[0].evaluations_results
        assert resumed[0].best_mean_reward == whole[0].best_mean_reward
        assert resumed[1].last_time_trigger == whole[1].last_time_trigger > 0
        assert resumed[2].n_episodes == whole[2].n_episodes == STEPS // 20
        assert resumed[3].last_time_trigger == whole[3].last_time_trigger == STEPS

    @pytest.mark.parametrize(
        ("callback", "settings"),
        [
            (evaluating, "callback callback_on_new_best eval_env eval_freq n_eval_episodes deterministic render warn log_path "
             "best_model_save_path _is_success_buffer"),
            (lambda: EveryNTimesteps(9, StopTrainingOnMaxEpisodes(9)), "n_steps callback"),
            (lambda: StopTrainingOnMaxEpisodes(9), "max_episodes _total_max_episodes"),
            (lambda: StopTrainingOnNoModelImprovement(9), "max_no_improvement_evals min_evals"),
        ],
    )  # fmt: skip
    def test_all_that_changes_in_sb3s_callbacks_is_known(self, callback, settings):
        """What a later SB3 adds belongs into ``SB3_ATTRIBUTES``, or here if it does not change or begins anew."""
        of_all = "globals locals n_calls num_timesteps parent verbose"
        assert {*vars(callback())} - {*callback_state._names(callback())} <= {*of_all.split(), *settings.split()}

    def test_the_patience_with_a_model_that_does_not_improve_goes_on(self, tmp_path):
        def callbacks():
            patience = StopTrainingOnNoModelImprovement(1000)
            return patience, [evaluating(4, callback_after_eval=patience), TD3XCheckpointCallback(40, tmp_path)]

        before, given = callbacks()
        model(seeded()).learn(40, given)
        after, given = callbacks()
        resume_run(tmp_path, seeded()).learn(41, given, resume=True)
        assert after.no_improvement_evals == before.no_improvement_evals > 0
        assert after.last_best_mean_reward == before.last_best_mean_reward

    def test_the_best_model_comes_back_where_the_scores_are_no_longer_written(self, tmp_path):
        checkpoint, best = TD3XCheckpointCallback(40, tmp_path / "checkpoint"), {"best_model_save_path": tmp_path}
        model(seeded()).learn(40, [evaluating(log_path=tmp_path, **best), checkpoint])
        (tmp_path / "best_model.zip").write_bytes(b"")
        resume_run(tmp_path / "checkpoint", seeded()).learn(41, evaluating(**best), resume=True)
        assert TD3X.load(tmp_path / "best_model").num_timesteps in (20, 40)

    @pytest.mark.filterwarnings("error:not restored exactly")
    def test_an_evaluation_does_not_begin_its_seeded_episodes_again(self, tmp_path):
        def evaluation(name):
            return evaluating(env=make_vec_env(LineEnv, seed=7), log_path=tmp_path / name)

        whole, resumed = evaluation("whole"), evaluation("cut")
        model(seeded(), seed=1).learn(80, whole)
        model(seeded(), seed=1).learn(40, [evaluation("cut"), TD3XCheckpointCallback(40, tmp_path / "checkpoint")])
        resume_run(tmp_path / "checkpoint", seeded()).learn(80, resumed, resume=True)
        assert resumed.evaluations_results == whole.evaluations_results

    def test_the_clock_of_an_evaluation_continues(self, tmp_path, monkeypatch):
        clock = [0.0]
        monkeypatch.setattr("sb3_td3x.runs.evaluation.time.perf_counter", lambda: clock[0])

        def tick(local, _):
            clock[0] += 1
            return True

        def callbacks():
            return [ConvertCallback(tick), scoring(tmp_path), TD3XCheckpointCallback(10, tmp_path / "checkpoint")]

        model(seeded(OpenLineEnv), seed=1).learn(30, callbacks())
        clock[0] = 1000.0
        evaluated = callbacks()
        with pytest.warns(UserWarning, match="ConvertCallback"):
            resume_run(tmp_path / "checkpoint", seeded(OpenLineEnv)).learn(60, evaluated, resume=True)
        assert evaluated[1].seconds == [20, 30, 40, 60]

    def test_a_callback_of_unknown_state_is_named(self, tmp_path):
        class Mine(EveryNTimesteps):
            pass

        def mine():
            return Mine(10, StopTrainingOnMaxEpisodes(1000))

        model(seeded()).learn(40, [mine(), TD3XCheckpointCallback(20, tmp_path)])
        with pytest.warns(UserWarning, match=r"not restored exactly: callback Mine\[0\]") as warned:
            resume_run(tmp_path, seeded()).learn(60, [mine()], resume=True)
        assert {warning.filename for warning in warned} == {__file__}

    def test_a_list_of_the_users_own_keeps_its_state_and_its_callbacks(self, tmp_path):
        class Curriculum(CallbackList):
            resumable = ("level",)
            level = 0

            def _on_step(self):
                self.level += 1
                return super()._on_step()

        def callbacks():
            own = Curriculum([StopTrainingOnMaxEpisodes(1000)])
            return own, [own, TD3XCheckpointCallback(20, tmp_path)]

        model(seeded()).learn(40, callbacks()[1])
        own, given = callbacks()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            resume_run(tmp_path, seeded()).learn(80, given, resume=True)
        assert (own.level, own.n_calls, own.callbacks[0].n_calls, own.callbacks[0].n_episodes) == (80, 80, 80, 4)

    def test_an_evaluation_with_a_nan_keeps_its_environment(self, tmp_path):
        class Undefined(LineEnv):
            def step(self, action):
                observation, _, *rest = super().step(action)
                return observation, math.nan, *rest

        def callbacks(folder):
            evaluation = evaluating(10, seeded(Undefined))
            return evaluation, [evaluation, TD3XCheckpointCallback(20, folder)]

        whole, given = callbacks(tmp_path / "whole")
        model(seeded()).learn(80, given)
        model(seeded()).learn(40, callbacks(tmp_path / "cut")[1])
        resumed, given = callbacks(tmp_path / "cut")
        resume_run(tmp_path / "cut", seeded()).learn(80, given, resume=True)
        of_seeds = [env_state.get(each.eval_env)["envs"][0]["layers"][1] for each in (whole, resumed)]
        assert of_seeds[0] == of_seeds[1] != {"episode": 0}

    def test_one_that_is_not_given_again_or_was_not_saved_is_named(self, tmp_path):
        model(seeded()).learn(40, [evaluating(10), TD3XCheckpointCallback(20, tmp_path)])
        with pytest.warns(UserWarning, match=r"callback EvalCallback\[0\] \(it was not given\)"):
            resume_run(tmp_path, seeded()).learn(60, resume=True)
        with pytest.warns(UserWarning, match=r"callback StopTrainingOnMaxEpisodes\[0\] \(it was not saved\)"):
            resume_run(tmp_path, seeded()).learn(60, StopTrainingOnMaxEpisodes(1000), resume=True)
        with pytest.warns(UserWarning, match=r"callback ConvertCallback\[0\] \(it was not saved\)"):
            resume_run(tmp_path, seeded()).learn(60, lambda *_: True, resume=True)

    def test_an_evaluations_wrapper_that_may_remember_is_named(self, tmp_path):
        class CountsResets(gym.Wrapper):
            """Of a package of the user's."""

        evaluations = [evaluating(10, seeded(wrapper=CountsResets)) for _ in range(2)]
        model(seeded()).learn(40, [evaluations[0], TD3XCheckpointCallback(20, tmp_path)])
        with pytest.warns(UserWarning, match=r"the environments of callback EvalCallback\[0\]"):
            resume_run(tmp_path, seeded()).learn(60, evaluations[1], resume=True)


@pytest.mark.parametrize("otherwise", [{}, {"is_success": None}])
def test_an_environment_may_tell_of_its_successes_alone(otherwise, tmp_path):
    class Tells(LineEnv):
        ended = 0

        def step(self, action):
            *rest, info = super().step(action)
            self.ended += rest[3]
            return *rest, {"is_success": True} if rest[3] and self.ended in (5, 7, 9) else {**info, **otherwise}

    model(seeded()).learn(60, scoring(tmp_path, seeded(Tells), n_eval_episodes=3))
    with np.load(tmp_path / "evaluations.npz") as arrays:
        assert arrays["successes"].tolist() == [[False, False, False], [False, True, False], [True, False, True]]


@pytest.mark.parametrize("around", [lambda saving: saving, lambda saving: CallbackList([saving])])
@pytest.mark.parametrize(
    "outer",
    [
        lambda inner: EveryNTimesteps(20, inner),
        lambda inner: evaluating(callback_after_eval=inner),
        lambda inner: evaluating(callback_on_new_best=inner),
    ],
    ids=["every", "after evaluations", "on new best"],
)
def test_a_checkpoint_inside_another_callback_is_refused(outer, around, tmp_path):
    inner = around(TD3XCheckpointCallback(20, tmp_path))
    callback = outer(inner)
    said = f"a checkpoint cannot be made inside {type(callback).__name__}: give TD3XCheckpointCallback to learn itself"
    learner = model(seeded())
    with pytest.raises(ValueError, match=said):
        learner.learn(60, callback)
    is_told_of_the_start = getattr(callback, "callback_on_new_best", None) is None  # by SB3
    assert learner.num_timesteps == (0 if is_told_of_the_start else 20)


def test_another_number_of_episodes_is_refused_before_a_step_is_made_or_a_score_is_lost(tmp_path):
    def evaluation(episodes):
        return evaluating(n_eval_episodes=episodes, log_path=str(tmp_path / "scores"))

    model(seeded()).learn(40, [evaluation(2), TD3XCheckpointCallback(20, tmp_path / "run")])
    resumed = resume_run(tmp_path / "run", seeded())
    (scores := tmp_path / "scores" / "evaluations.npz").write_bytes(b"newer")
    with pytest.raises(CheckpointError, match=r"evaluated over 2 episodes so far, not 3.* give it n_eval_episodes=2"):
        resumed.learn(80, [evaluation(3), TD3XCheckpointCallback(20, tmp_path / "run")], resume=True)
    assert (resumed.num_timesteps, scores.read_bytes()) == (40, b"newer")
    resumed.learn(80, [evaluation(2), TD3XCheckpointCallback(20, tmp_path / "run")], resume=True)
    with np.load(scores) as archive:
        assert archive["timesteps"].tolist() == [20, 40, 60, 80]
        assert archive["ep_lengths"].tolist() == [[20, 20]] * 4
    resumed = resume_run(tmp_path / "run", seeded())
    assert resumed.learn(100, evaluating(n_eval_episodes=3), resume=True).num_timesteps == 100  # not written


def test_an_evaluations_environment_need_not_have_a_state_before_it_was_reset(tmp_path):
    evaluation = evaluating(env=DummyVecEnv([lambda: ResumableEnv(OpenLineEnv())]))
    learned = model(seeded()).learn(40, [evaluation, TD3XCheckpointCallback(20, tmp_path)])
    assert learned.num_timesteps == 40
    assert saved_steps(tmp_path) == [20, 40]


@pytest.fixture
def board_files(monkeypatch):
    """TensorBoard sorts files of one second by their number in the process, as text: 10 before 9."""
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))


@pytest.mark.usefixtures("board_files")
def test_tensorboard_drops_what_a_lost_process_wrote(tmp_path):
    board = str(tmp_path / "board")
    learner = model(seeded(), tensorboard_log=board)
    learner.learn(80, TD3XCheckpointCallback(20, tmp_path / "run", keep_last=9), log_interval=1)
    resumed = resume_run(tmp_path / "run", seeded(), checkpoint=40)
    resumed.learn(160, TD3XCheckpointCallback(20, tmp_path / "run", keep_last=9), log_interval=1, resume=True)
    assert board_steps(tmp_path / "board" / "TD3X_1") == [20, 40, 60, 80, 100, 120, 140, 160]


@pytest.mark.usefixtures("board_files")
def test_tensorboard_drops_nothing_of_another_run_in_the_same_folder(tmp_path):
    """SB3 continues in the newest one."""
    for number in (1, 2):
        learner = model(seeded(), seed=number, tensorboard_log=str(tmp_path / "board"))
        learner.learn(80, TD3XCheckpointCallback(20, tmp_path / f"run{number}", keep_last=9), log_interval=1)
    resume_run(tmp_path / "run1", seeded(), checkpoint=40).learn(60, log_interval=1, resume=True)
    assert board_steps(tmp_path / "board" / "TD3X_2")[:4] == [20, 40, 60, 80]


def test_callbacks_find_themselves_in_the_locals_of_every_hook():
    hooks = ("_on_training_start", "_on_rollout_start", "_on_step", "_on_rollout_end", "_on_training_end")
    found = []
    given = CallbackList([Calls(**dict.fromkeys(hooks, lambda callback: found.append(callback.locals["callback"])))])
    model().learn(20, given)
    assert all(each is given for each in found)
    assert len(found) == 2 + 3 * 20


def test_an_evaluation_that_is_due_inside_a_rollout_is_made_after_it(tmp_path):
    evaluation = scoring(tmp_path, eval_freq=30)
    model(seeded(), train_freq=(1, "episode")).learn(80, evaluation)  # episodes of 20 steps
    assert evaluation.evaluations_timesteps == [40, 60, 80]


def test_the_best_models_normalization_is_kept_where_a_later_model_is_no_better(tmp_path):
    (folder := RunDir(tmp_path, "Line")).settings.mkdir()
    evaluation = scoring(tmp_path, VecNormalize(seeded(), training=False, norm_reward=False))
    learner = model(VecNormalize(seeded())).learn(20, evaluation)
    best, evaluation.best_mean_reward = folder.best_normalization.read_bytes(), np.inf
    learner.learn(20, evaluation, reset_num_timesteps=False)
    assert folder.best_normalization.read_bytes() == best


def test_the_best_models_normalization_comes_back_with_the_checkpoint(tmp_path):
    def callbacks():
        evaluation = scoring(tmp_path, VecNormalize(seeded(), training=False, norm_reward=False))
        return [evaluation, TD3XCheckpointCallback(20, tmp_path / "checkpoint")]

    (folder := RunDir(tmp_path, "Line")).settings.mkdir()
    model(VecNormalize(seeded())).learn(40, callbacks())
    best = folder.best_normalization.read_bytes()
    folder.best_normalization.write_bytes(b"")
    resume_run(tmp_path / "checkpoint", VecNormalize(seeded())).learn(40, callbacks(), resume=True)
    assert folder.best_normalization.read_bytes() == best
