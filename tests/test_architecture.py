"""Imports between the package's rooms go down only, importing is cheap, and nothing runs or unpickles text freely."""

import ast
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "sb3_td3x"
REFERENCE = PACKAGE.parent / "docs" / "api"
FILES = sorted(path for path in PACKAGE.rglob("*.py"))
# From the lowest floor up: a module may import its own subpackage and those on lower floors
FLOORS = [
    {"errors", "version"},
    {"common"},
    {"saving", "results", "presets"},
    {"td3x"},
    {"checkpoint"},
    {"runs", "zoo"},
    {"publish"},
    {"cli"},
    {"__main__"},
]
FLOOR = {subpackage: number for number, subpackages in enumerate(FLOORS) for subpackage in subpackages}


def subpackage_of(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path):
    """(top-level package, subpackage of ours) for every import, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name.split(".")[0], None) for alias in node.names)
            assert not any(alias.name.startswith("sb3_td3x.") for alias in node.names), path
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, path
            parts = node.module.split(".")
            if parts[0] != "sb3_td3x":
                yield parts[0], None
            elif len(parts) > 1:
                yield "sb3_td3x", parts[1]
            else:
                yield from (("sb3_td3x", alias.name) for alias in node.names)


def test_every_module_is_in_a_subpackage():
    assert {subpackage_of(path) for path in FILES} - {"__init__"} == FLOOR.keys()


def test_imports_go_down_only():
    for path in FILES:
        importing = subpackage_of(path)
        for _, subpackage in imported(path) if importing != "__init__" else ():
            assert subpackage in (None, importing) or FLOOR[subpackage] < FLOOR[importing], f"{path} imports {subpackage}"


def test_the_losses_need_torch_alone():
    packages = {package for package, _ in imported(PACKAGE / "td3x" / "losses.py")}
    assert packages <= {"torch", "collections"}


def test_importing_the_package_or_its_command_is_cheap_and_importing_td3x_brings_no_tool():
    code = "import sys, sb3_td3x.cli; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    code = "import sys; from sb3_td3x import TD3X; print(*sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    tools = {"rl_zoo3", "typer", "pybullet", "imageio", "sb3_contrib", "ray", "onnx", "onnxruntime", "huggingface_hub"}
    assert "torch" in loaded
    assert not tools & set(loaded)


def test_nothing_runs_text_or_unpickles_freely():
    for path in FILES:
        for call in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)):
            called = ast.unparse(call.func)
            place = f"{path}:{call.lineno}: {called}"
            assert called not in ("eval", "exec", "compile", "__import__", "os.system", "yaml.unsafe_load"), place
            assert called not in ("pickle.load", "pickle.loads", "cloudpickle.load", "cloudpickle.loads"), place
            assert called not in ("th.load", "torch.load", "pickle.Unpickler"), place
            for keyword in call.keywords:
                assert keyword.arg not in ("shell", "allow_pickle"), place


def test_public_names_are_documented():
    import sb3_td3x

    for name in set(sb3_td3x.__all__) - {"__version__"}:
        assert getattr(sb3_td3x, name).__doc__, name
    documented = " ".join(page.read_text() for page in REFERENCE.glob("*.md")).split()
    for name in set(sb3_td3x.__all__) - {"__version__", "MlpPolicy"}:
        assert f"sb3_td3x.{name}" in documented, name
