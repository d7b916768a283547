"""
The tests under each supported Python, and with the oldest dependencies that pyproject.toml allows.

`nox` runs all sessions whose Python is there, `nox -s tests-3.12` one, `nox -s oldest -- tests/test_losses_by_hand.py` a part.
"""

import re

import nox

PROJECT = nox.project.load_toml("pyproject.toml")["project"]
PYTHONS = [text.split()[-1] for text in PROJECT["classifiers"] if text.startswith("Programming Language :: Python :: 3.")]
nox.options.default_venv_backend = "uv|virtualenv"  # with uv, UV_TORCH_BACKEND=cpu chooses PyTorch's CPU builds


def oldest(requirements: list[str]) -> list[str]:
    """Each requirement at its lower bound: ``numpy>=1.24,<3`` becomes ``numpy==1.24``."""
    return [re.sub(r"^([\w.-]+)(\[.*\])?>=([\d.]+).*", r"\1\2==\3", requirement) for requirement in requirements]


@nox.session(python=PYTHONS)
def tests(session: nox.Session) -> None:
    """Newest versions of everything."""
    session.install("pip", "-e", ".[dev]")
    session.run("pytest", "-n", "auto", "--dist", "worksteal", *session.posargs)


@nox.session(name="oldest", python=PYTHONS[0])
def oldest_dependencies(session: nox.Session) -> None:
    """The lower bounds of the dependencies; extras as new as they then can be."""
    session.install("pip", *oldest(PROJECT["dependencies"]), "-e", ".[dev]")
    session.run("pytest", "-n", "auto", "--dist", "worksteal", *session.posargs)
