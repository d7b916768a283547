"""A run as a repository of the Hugging Face Hub, with the files and names of huggingface_sb3 and rl-zoo3."""

import json
import re
import shutil
import zipfile
from contextlib import closing
from datetime import datetime, timezone
from pathlib import Path

import huggingface_hub
import numpy as np
import yaml
from jinja2 import Template
from stable_baselines3.common.vec_env import VecNormalize

from sb3_td3x.common import files
from sb3_td3x.errors import UntrustedModelError
from sb3_td3x.results.run_dir import ALGORITHM, ARGUMENTS, EVALUATIONS, LOG, SCORES, RunDir, file_name, read_settings
from sb3_td3x.runs import play
from sb3_td3x.runs.environments import PACKAGES
from sb3_td3x.saving.pickle_files import load_vecnormalize

STATISTICS = "vec_normalize.pkl"
VIDEO = "replay.mp4"
METRICS = "train_eval_metrics.zip"


def model_name(env_id: str) -> str:
    """``{algorithm}-{environment}``, as huggingface_sb3 and rl-zoo3 name a saved model and its repository."""
    return f"{ALGORITHM}-{file_name(env_id.rpartition(':')[2])}"


def write(run: RunDir, out: Path, repo_id: str, episodes: int = 10, seed: int = 1_000, trust: bool = False) -> None:
    """Evaluate the best model, write its repository to a new folder. With ``trust`` the card says whether loading needs it."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo_id):
        raise ValueError(f"{repo_id!r} is not the name of a repository: give user/name")
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} already contains files: choose another folder")
    run.require_no_links(trust)  # they may lead to a secret
    returns = play.evaluate(run, episodes, seed, "cpu", trust)
    is_safe = not trust or _loads_without_trust(run)
    out.mkdir(parents=True, exist_ok=True)
    copies = {run.model(): f"{model_name(run.env_id)}.zip", run.config_file: "config.yml", run.args_file: ARGUMENTS,
              run.model_normalization(): STATISTICS, run.video: VIDEO}  # fmt: skip
    for path, name in copies.items():
        if path is not None and path.is_file():
            shutil.copyfile(path, out / name)
    with zipfile.ZipFile(out / METRICS, "w", zipfile.ZIP_DEFLATED) as archive:  # as rl-zoo3 unpacks it
        for path in filter(Path.is_file, (run.evaluations, *sorted(run.path.glob("*.csv")))):
            archive.write(path, path.name)
    # rl-zoo3's download expects this file
    (out / "env_kwargs.yml").write_text(yaml.safe_dump(run.env_kwargs() or {}))
    results = {
        "mean_reward": float(returns.mean()),
        "std_reward": float(returns.std()),
        "is_deterministic": True,
        "n_eval_episodes": len(returns),
        "eval_datetime": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "seed": seed,
    }
    (out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    (out / "README.md").write_text(_card(run, repo_id, returns, is_safe), encoding="utf-8")


def _loads_without_trust(run: RunDir) -> bool:
    with closing(play.open_evaluation_env(run, seed=0, trust=True)) as env:  # hindsight replay needs one
        try:
            play.load_model(run, env, "cpu")
            if isinstance(env, VecNormalize):
                load_vecnormalize(str(run.model_normalization()), env.venv)
            return True
        except UntrustedModelError:
            return False


def upload(folder: Path, repo_id: str, private: bool = False) -> str:
    """Upload the files of a folder to a repository, which is created if it does not exist; returns its address."""
    try:
        api = huggingface_hub.HfApi()
        address = api.create_repo(repo_id=repo_id, private=private, exist_ok=True)
        if not (is_exposed := private and not api.repo_info(repo_id).private):  # an existing one keeps its visibility
            api.upload_folder(
                repo_id=repo_id, folder_path=folder, commit_message="Upload a TD3X agent",
                delete_patterns=[f"{ALGORITHM}-*.zip", STATISTICS, VIDEO],  # of another run that was pushed before
            )  # fmt: skip
    except Exception as error:  # those of huggingface_hub, its HTTP library and the system have no common class
        needs = "a missing connection or token is a usual reason: hf auth login, or the variable HF_TOKEN"
        raise ValueError(f"{repo_id} cannot be uploaded: {error} ({needs})") from error
    if is_exposed:
        raise ValueError(f"{repo_id} is public and nothing was uploaded: make it private there, or give another name")
    return str(address)


def pull(repo_id: str, out: Path) -> RunDir:
    """Download a run that was pushed, as a run folder that ``td3x enjoy``, ``eval`` and ``report`` read as untrusted."""
    try:
        folder = Path(huggingface_hub.snapshot_download(repo_id, allow_patterns=["*.zip", "*.yml", STATISTICS, VIDEO]))
    except Exception as error:  # as for an upload
        raise ValueError(f"{repo_id} cannot be downloaded: {error}") from error
    models = [path.name for path in folder.glob("*.zip") if path.name != METRICS]
    if len(models) != 1 or not all((folder / name).is_file() for name in (ARGUMENTS, "config.yml")):
        raise ValueError(f"{repo_id} is not the repository of a run: it needs args.yml, config.yml and one model (.zip)")
    env_id = read_settings(folder / ARGUMENTS).get("env")
    if not isinstance(env_id, str):
        raise ValueError(f"{ARGUMENTS} of {repo_id} names no environment")
    logs: dict[str, bytes] = {}
    if (folder / METRICS).is_file():
        try:
            with zipfile.ZipFile(folder / METRICS) as archive:
                members = files.unpacked(archive, (folder / METRICS).stat().st_size)
                logs = {name: members[name] for name in (EVALUATIONS, LOG, SCORES) if name in members}
        except Exception as error:  # zipfile and zlib have no common class of errors
            raise ValueError(f"{METRICS} of {repo_id} cannot be read: {error}") from error
    run = RunDir.create(out, env_id)
    for name, content in logs.items():
        (run.path / name).write_bytes(content)
    copies = {models[0]: run.best_model, "config.yml": run.config_file, ARGUMENTS: run.args_file,
              STATISTICS: run.best_normalization, VIDEO: run.video}  # fmt: skip
    for name, path in copies.items():
        if (folder / name).is_file():
            path.parent.mkdir(exist_ok=True)
            shutil.copyfile(folder / name, path)
    return run


def _card(run: RunDir, repo_id: str, returns: np.ndarray, is_safe: bool) -> str:
    """The model card: the metadata of SB3's models on the Hub, then how to use the model and how to train it again."""
    env_id, arguments = run.env_id, run.arguments()
    score = f"{returns.mean():.2f} +/- {returns.std():.2f}"
    data = huggingface_hub.ModelCardData(
        library_name="stable-baselines3",
        tags=[env_id, "deep-reinforcement-learning", "reinforcement-learning", "stable-baselines3", ALGORITHM],
        model_name="TD3X",
        eval_results=[huggingface_hub.EvalResult("reinforcement-learning", env_id, env_id, "mean_reward", score)],
    )
    wrapper, env_kwargs = run.config().get("env_wrapper"), run.env_kwargs()
    template = Template(Path(__file__).with_name("card.md.j2").read_text(encoding="utf-8"))
    return template.render(
        card_data=data.to_yaml(),
        env_id=env_id,
        packages=[package for package, (_, names) in PACKAGES.items() if re.search(names, env_id)],
        repo_id=repo_id,
        name=model_name(env_id),
        score=score,
        episodes=len(returns),
        model="the best evaluation during training" if run.model() == run.best_model else "which training ended",
        trust="" if is_safe else ", trust=True",
        wrapper=repr(wrapper) if wrapper else "",
        env_kwargs=f", env_kwargs={env_kwargs!r}" if env_kwargs else "",
        statistics=STATISTICS if run.model_normalization() is not None else "",
        training=run.command() or "",
        config=run.config_file.read_text("utf-8"),
        versions=yaml.safe_dump(arguments["versions"], sort_keys=False) if arguments.get("versions") else "",
    )
