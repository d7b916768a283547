"""What is published holds the package and nothing else, and the wheel alone runs the README's first example."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from tests.test_docs_and_examples_run import BLOCK, ROOT, STEPS, with_few_steps

NOT_IN_A_CLONE = (".*", "__pycache__", "*.egg-info", "_build")
NOT_AT_ITS_ROOT = ("build", "dist", "logs", "runs")


def files_of(package: Path) -> set[str]:
    kept = [path for path in package.rglob("*") if path.suffix in (".py", ".typed", ".yml", ".j2")]
    return {path.relative_to(package.parent).as_posix() for path in kept}


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """The sdist, and the wheel made from it, built where nothing of an earlier build can get into them."""
    folder = tmp_path_factory.mktemp("packaging")

    def ignored(place, names):
        patterns = (*NOT_IN_A_CLONE, *(NOT_AT_ITS_ROOT if Path(place) == ROOT else ()))
        return shutil.ignore_patterns(*patterns)(place, names)

    clone = shutil.copytree(ROOT, folder / "clone", ignore=ignored)
    (clone / "agents" / "HopperBulletEnv-v0" / "video").mkdir(exist_ok=True)
    (clone / "agents" / "HopperBulletEnv-v0" / "video" / "best_model.mp4").touch()  # as README's example leaves it
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder / "dist"), str(clone)]
    done = subprocess.run(build, capture_output=True, text=True, env={**os.environ, "PIP_NO_INDEX": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,), (sdist,) = (folder / "dist").glob("*.whl"), (folder / "dist").glob("*.tar.gz")
    return wheel, sdist


def test_the_wheel_holds_the_package_alone(published):
    names = set(zipfile.ZipFile(published[0]).namelist())
    about = {name for name in names if name.split("/")[0].endswith(".dist-info")}
    assert names - about == files_of(ROOT / "sb3_td3x")
    assert {"sb3_td3x/py.typed", "sb3_td3x/presets/default.yml"} <= names
    assert {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "LICENSE"} <= {name.rsplit("/", 1)[1] for name in about}


def test_the_sdist_holds_what_its_tests_and_pages_need_and_no_results(published):
    with tarfile.open(published[1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    needed = {"Makefile", "constraints.txt", "CHANGELOG.md", "LICENSE", "tests/tools.py", "docs/conf.py", "agents/README.md"}
    assert needed | {"docs/inventories/python.inv", "examples/minimal.py"} <= names
    golden = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests" / "golden").iterdir()}
    assert files_of(ROOT / "sb3_td3x") | golden <= names
    assert not [
        name for name in names if name.startswith(("benchmarks/results/", "logs/", "runs/")) or name.endswith((".pyc", ".mp4"))
    ]


def test_the_wheel_alone_runs_the_readme_in_an_empty_folder(published, tmp_path):
    """Dependencies are this environment's, the package is not: the checkout and its editable install are out of reach."""
    fresh, empty = tmp_path / "venv", tmp_path / "empty"
    venv.create(fresh, with_pip=False)
    empty.mkdir()
    paths = {
        scheme: sysconfig.get_path(scheme, vars={"base": str(fresh), "platbase": str(fresh)})
        for scheme in ("purelib", "scripts")
    }
    python = str(Path(paths["scripts"], "python"))
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", str(published[0])]
    alone = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    subprocess.run(pip, check=True, env=alone)
    # Only names in a site folder's own .pth files are followed, so an editable install's stay unread
    Path(paths["purelib"], "dependencies.pth").write_text(
        "\n".join({sysconfig.get_path(lib) for lib in ("purelib", "platlib")})
    )
    shown = next(code for language, code in BLOCK.findall((ROOT / "README.md").read_text()) if language == "python")
    code = "import sb3_td3x; print(sb3_td3x.__file__)\n" + with_few_steps(shown) + "\nprint(model.num_timesteps)"
    done = subprocess.run([python, "-c", code], cwd=empty, env=alone, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    printed = done.stdout.splitlines()
    assert any(Path(line).is_relative_to(fresh) for line in printed if line.endswith("__init__.py")), printed[:3]
    assert int(printed[-1]) >= STEPS
    assert [path.name for path in empty.iterdir()] == ["walker.zip"], (
        "the program writes the model that it saves, and nothing else"
    )
    command = Path(paths["scripts"], "td3x")
    assert (
        "train" in subprocess.run([command, "--help"], cwd=empty, env=alone, capture_output=True, text=True, check=True).stdout
    )
