"""
A run as a repository of the Hugging Face Hub, in the files and names of huggingface_sb3 and rl-zoo3.

Whoever loads it need not trust whoever made it: model and statistics are read here as a stranger would read them, first.
"""

import json
import shutil
import zipfile
from collections.abc import Iterator
from datetime import datetime, timezone
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import yaml
from stable_baselines3.common.vec_env import VecTransposeImage, is_vecenv_wrapped

from sb3_td3x.errors import UntrustedModelError
from sb3_td3x.results.run_dir import ALGORITHM, RunDir, file_name
from sb3_td3x.runs import environments, play, repetition
from sb3_td3x.td3x.td3x import TD3X

STATISTICS = "vec_normalize.pkl"
FILM = "replay.mp4"


def model_name(env_id: str) -> str:
    """The family's name of a model, ``{algorithm}-{environment}``: of its zip, and usually of its repository."""
    return f"{ALGORITHM}-{file_name(env_id.rpartition(':')[2])}"


def require_repository(repo_id: str) -> None:
    """
    :raises ValueError: without the packages of the extra ``hub``, or for a name that is not ``user/name``
    """
    if find_spec("huggingface_hub") is None:
        raise ValueError('the Hugging Face Hub needs huggingface_hub: pip install "sb3-td3x[hub]"')
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise ValueError(f"{repo_id!r} is no repository's name: {error}") from error
    if repo_id.count("/") != 1:
        raise ValueError(f"{repo_id!r} is no repository's name: give user/name")


def write(run: RunDir, out: Path, repo_id: str, episodes: int = 10, seed: int = 1_000, trust: bool = False) -> np.ndarray:
    """
    Evaluate a run's best model on fresh episodes and write the files of its repository.

    :param out: an empty folder, or one to be made
    :param repo_id: ``user/name``, for the model card
    :param episodes: of the evaluation
    :param seed: the episodes are determined by it
    :param trust: import the module that the environment's name may have, and also write a model that holds objects which run
        code when they are loaded; the model card says so
    :return: the returns ``(episodes,)``
    :raises UntrustedModelError: for such a model, without ``trust``
    :raises ValueError: for a run without a model, a folder with files in it, or a name that is not ``user/name``
    """
    require_repository(repo_id)
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} holds files already: take another folder")
    environments.require_registered(run.env_id, may_import=trust)
    try:
        _require_safe(run, may_lead_out=trust)  # what it leads to is pushed as plain files
        is_safe = True
    except UntrustedModelError:
        if not trust:
            raise
        is_safe = False
    returns = play.evaluate(run, episodes, seed, "cpu", trust)
    out.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(run.model(), out / f"{model_name(run.env_id)}.zip")
    shutil.copyfile(run.config_file, out / "config.yml")
    shutil.copyfile(run.args_file, out / "args.yml")
    (out / "env_kwargs.yml").write_text("{}\n")  # rl-zoo3's download expects one; td3x has no such option
    if (statistics := run.model_normalization()) is not None:
        shutil.copyfile(statistics, out / STATISTICS)
    if run.film.exists():
        shutil.copyfile(run.film, out / FILM)
    _write_scores(run, out)
    _write_results(returns, seed, out)
    (out / "README.md").write_text(card(run, repo_id, returns, is_safe), encoding="utf-8")
    return returns


def upload(folder: Path, repo_id: str, private: bool = False) -> str:
    """
    Make the repository if it is not there, and upload the files that ``write`` has written.

    :param private: make it one that others cannot see
    :return: its address
    :raises ValueError: if the Hub cannot be reached or refuses, or has a public repository where a private one is asked for
    """
    require_repository(repo_id)
    from huggingface_hub import HfApi

    try:
        api = HfApi()
        address = api.create_repo(repo_id=repo_id, private=private, exist_ok=True)
        is_seen_by_all = private and not api.repo_info(repo_id).private  # one that was there stays as it was
        if not is_seen_by_all:
            api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message="Upload a TD3X agent")
    except Exception as error:  # those of huggingface_hub, of its HTTP library and of the system have no common class
        raise ValueError(
            f"{repo_id} cannot be uploaded: {error}. It needs a connection and a token that may write there "
            "(hf auth login, or the variable HF_TOKEN)"
        ) from error
    if is_seen_by_all:
        raise ValueError(f"{repo_id} is public and nothing was uploaded: make it private on the Hub, or give another name")
    return str(address)


def _require_safe(run: RunDir, may_lead_out: bool) -> None:
    """
    :raises UntrustedModelError: if a stranger could not load model and statistics without trust
    """
    env = play.open_evaluation_env(run, seed=0, may_lead_out=may_lead_out)
    try:
        play.load_model(run, env, "cpu")
    finally:
        env.close()


def _write_scores(run: RunDir, out: Path) -> None:
    """What training and its evaluations scored, in the archive that rl-zoo3's download unpacks."""
    with zipfile.ZipFile(out / "train_eval_metrics.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for path in (run.evaluations, *sorted(run.path.glob("*.csv"))):
            if path.exists():
                archive.write(path, path.name)


def _write_results(returns: np.ndarray, seed: int, out: Path) -> None:
    results = {
        "mean_reward": float(returns.mean()),
        "std_reward": float(returns.std()),
        "is_deterministic": True,
        "n_eval_episodes": len(returns),
        "eval_datetime": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "seed": seed,
    }
    (out / "results.json").write_text(json.dumps(results, indent=1) + "\n")


def card(run: RunDir, repo_id: str, returns: np.ndarray, is_safe: bool = True) -> str:
    """
    The model card: the family's metadata, then what a reader needs to use the model and to repeat it.

    :param returns: of the evaluation, ``(episodes,)``
    :param is_safe: whether it loads without trust
    """
    from huggingface_hub import ModelCardData
    from huggingface_hub.repocard import metadata_eval_result

    algorithm, env_id = TD3X.__name__, run.env_id
    result = metadata_eval_result(
        model_pretty_name=algorithm,
        task_pretty_name="reinforcement-learning",
        task_id="reinforcement-learning",
        metrics_pretty_name="mean_reward",
        metrics_id="mean_reward",
        metrics_value=f"{returns.mean():.2f} +/- {returns.std():.2f}",
        dataset_pretty_name=env_id,
        dataset_id=env_id,
    )
    tags = [env_id, "deep-reinforcement-learning", "reinforcement-learning", "stable-baselines3", ALGORITHM]
    kept = "the best evaluation during training" if run.model() == run.best_model else "which training ended"
    metadata = ModelCardData(library_name="stable-baselines3", tags=tags, **result)
    sections = [
        f"---\n{metadata.to_yaml()}\n---",
        f"# **{algorithm}** Agent playing **{env_id}**",
        f"This is a trained model of a **{algorithm}** agent (TD3) playing **{env_id}** using the\n"
        "[stable-baselines3 library](https://github.com/DLR-RM/stable-baselines3) and sb3_td3x.",
        f"Mean return {returns.mean():.2f} +/- {returns.std():.2f} (standard deviation) over {len(returns)} fresh episodes\n"
        f"without exploration noise. It is the model with {kept}.",
        *([] if is_safe else ["**Loading this model runs code of its author**: it needs `trust=True`."]),
        f"## Usage\n```python\n{_usage(run, repo_id, is_safe)}```",
        *_repetition(run),
        f"## Hyperparameters\n```yaml\n{run.config_file.read_text().strip()}\n```",
        *_versions(run),
    ]
    return "\n\n".join(sections) + "\n"


def _usage(run: RunDir, repo_id: str, is_safe: bool) -> str:
    """A program that downloads the model and evaluates it."""
    return "".join(f"{line}\n" for line in _usage_lines(run, repo_id, "" if is_safe else ", trust=True"))


def _usage_lines(run: RunDir, repo_id: str, trust: str) -> Iterator[str]:
    wrapper = run.config().get("env_wrapper")
    is_normalized = run.model_normalization() is not None
    if "Bullet" in run.env_id:
        yield "import pybullet_envs_gymnasium  # registers the PyBullet environments"
    yield "from huggingface_hub import hf_hub_download"
    yield "from stable_baselines3.common.env_util import make_vec_env"
    yield "from stable_baselines3.common.evaluation import evaluate_policy"
    if turns_images := is_normalized and _turns_images(run, bool(trust)):
        yield "from stable_baselines3.common.vec_env import VecTransposeImage"
    yield ""
    yield "from sb3_td3x import TD3X" + (", load_vecnormalize" if is_normalized else "")
    if wrapper:
        yield "from sb3_td3x.runs.environments import wrapped"
    yield ""
    with_wrapper = f", wrapper_class=lambda env: wrapped(env, {wrapper!r})" if wrapper else ""
    yield f'env = make_vec_env("{run.env_id}"{with_wrapper})'
    if turns_images:
        yield "env = VecTransposeImage(env)"
    if is_normalized:
        yield f'env = load_vecnormalize(hf_hub_download("{repo_id}", "{STATISTICS}"), env{trust})'
        yield "env.training = env.norm_reward = False"
    yield f'path = hf_hub_download("{repo_id}", "{model_name(run.env_id)}.zip")'
    yield f"model = TD3X.load(path, env=env, buffer_size=1{trust})" + ("" if trust else "  # runs no code of the file")
    yield "print(evaluate_policy(model, env, n_eval_episodes=10))"


def _turns_images(run: RunDir, trust: bool) -> bool:
    """Whether the run's statistics are of images with their channels first."""
    env = play.open_evaluation_env(run, seed=0, trust=trust, may_lead_out=True)  # links were refused before, or are trusted
    env.close()
    return is_vecenv_wrapped(env, VecTransposeImage)


def _repetition(run: RunDir) -> list[str]:
    """The commands that make the run again; none for a run that td3x did not make."""
    if not {"preset", "overrides"} <= run.arguments().keys():
        return []
    planned = {**run.arguments(), "n_timesteps": run.config()["n_timesteps"]}
    return ["\n".join(["## Training", "```sh", *repetition.commands(planned), "```"])]


def _versions(run: RunDir) -> list[str]:
    """What the run was made with; nothing for a run that td3x did not make."""
    versions = run.arguments().get("versions")
    return [f"## Versions\n```yaml\n{yaml.safe_dump(versions, sort_keys=False)}```"] if versions else []
