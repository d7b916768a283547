"""Search for hyperparameters with Optuna: a trial that falls behind the others is stopped, and the best model is kept."""

import argparse
import shutil

import optuna

from sb3_td3x import NonFiniteError
from sb3_td3x.runs import experiment  # what `td3x train` does; it may change


def objective(trial: optuna.Trial) -> float:
    overrides = (
        f"learning_rate={trial.suggest_float('learning_rate', 1e-4, 3e-3, log=True):g}",
        f"batch_size={trial.suggest_categorical('batch_size', [64, 128, 256])}",
        f"tau={trial.suggest_float('tau', 0.002, 0.02, log=True):g}",
    )
    request = experiment.Experiment(
        "Pendulum-v1", args.steps, overrides=overrides, eval_freq=max(args.steps // 10, 1), eval_episodes=5
    )

    def report(evaluation) -> None:
        trial.report(evaluation.last_mean_reward, evaluation.num_timesteps)
        if trial.should_prune():
            raise optuna.TrialPruned

    run = experiment.prepare(request)
    trial.set_user_attr("folder", str(run.folder.path))
    if not experiment.train(run, on_evaluation=report):
        trial.study.stop()  # Ctrl-C ends the search, not this trial alone
        raise optuna.TrialPruned
    return run.folder.scores()[1].mean(axis=1)[-3:].mean()  # of the last three evaluations


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=10_000)
parser.add_argument("--trials", type=int, default=20)
args = parser.parse_args()
pruner = optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=args.steps // 3)
search = optuna.create_study(direction="maximize", pruner=pruner, sampler=optuna.samplers.TPESampler(seed=0))
search.optimize(objective, args.trials, catch=NonFiniteError)  # a trial that diverges fails alone
if not search.get_trials(states=[optuna.trial.TrialState.COMPLETE]):
    raise SystemExit("no trial was completed")
print(search.best_params, search.best_trial.user_attrs["folder"])
shutil.copy(f"{search.best_trial.user_attrs['folder']}/best_model.zip", "best_of_search.zip")
