"""Every Python block of README and docs runs, every example runs, every command shown exists, every link leads somewhere."""

import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
STEPS = 300  # blocks and examples are run with this many steps instead of those they show
ELSEWHERE = {"walk_without_torch.py"}  # needs an exported model: test_exports_to_onnx runs it
FEWER = {"search.py": ["--trials", "2"]}


def blocks(language):
    return [
        pytest.param(content, id=f"{page.name}-{number}")
        for page in PAGES
        for number, (kind, content) in enumerate(BLOCK.findall(page.read_text()))
        if kind == language
    ]


def with_few_steps(code):
    """Scale ``learn(5e5, ...)`` and preset sizes of the shown code down to ``STEPS``."""
    return re.sub(r"\.learn\([\d_.e]+", f".learn({STEPS}", code)


@pytest.mark.parametrize("code", blocks("python"))
def test_python_blocks(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAY_ADDRESS", "local")  # not a cluster that another test runs
    exec(compile(with_few_steps(code), "block", "exec"), {})  # noqa: S102
    if "ray" in sys.modules:
        sys.modules["ray"].shutdown()


@pytest.mark.parametrize("code", blocks("sh"))
def test_shown_commands_exist(code):
    makefile = (ROOT / "Makefile").read_text()
    for line in code.splitlines():
        words = shlex.split(line, comments=True)
        if not words:
            continue
        if words[0] == "make":
            for word in words[1:]:
                if "=" in word:
                    assert re.search(rf"^{word.partition('=')[0]} \?=", makefile, re.MULTILINE), word
                else:
                    assert re.search(rf"^{word}:", makefile, re.MULTILINE), word
        elif words[0] == "td3x":
            shown = subprocess.run([sys.executable, "-m", "sb3_td3x", words[1], "--help"], capture_output=True, text=True)
            assert shown.returncode == 0, shown.stderr
            options = {word for word in words if word.startswith("--")}
            assert all(option in shown.stdout for option in options), options
        else:
            assert words[0] in {"pip", "git", "cd", "python"}, line


@pytest.mark.parametrize("path", [path for path in EXAMPLES if path.name not in ELSEWHERE], ids=lambda path: path.name)
def test_examples(path, tmp_path, monkeypatch):
    assert len(path.read_text().splitlines()) <= 40
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(path), "--steps", str(STEPS), *FEWER.get(path.name, [])])
    runpy.run_path(str(path), run_name="__main__")
    assert list(tmp_path.glob("*.zip")), "the example saves its model"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_pictures_are_there(page):
    for target in re.findall(r"\]\(([^)#]+)\)|\{figure\} (\S+)|\{include\} (\S+)|<img src=\"([^\"]+)\"", page.read_text()):
        (path,) = filter(None, target)
        if "://" not in path:
            assert (page.parent / path).exists(), f"{page.name} -> {path}"


def test_tests_named_in_the_docs_exist():
    for page in PAGES:
        for name in re.findall(r"\btest_\w+", page.read_text()):
            assert (ROOT / "tests" / f"{name}.py").exists(), f"{page.name}: {name}"


def test_no_page_shows_a_path_of_a_machine():
    assert not [page.name for page in PAGES if re.search(r"(?<![\w/.])/(home|root|work|tmp)/", page.read_text())]


@pytest.mark.skipif(os.name == "nt", reason="make is not expected on Windows")
def test_make_help_lists_the_targets():
    printed = subprocess.run(["make", "-s", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for target in ("train", "test", "install", "lint", "format", "type", "docs", "bench", "commit-checks", "clean"):
        assert target in printed
