"""GPU tests, benchmarks and tools import, and replace only names that exist. No CPU test runs them.

`make check` has mypy look up the names in their code. mypy does not see names in strings, as in
`monkeypatch.setattr(step, "averages", ...)`.
"""

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(path for folder in ("tests/gpu", "bench", "tools") for path in (ROOT / folder).rglob("*.py"))
SCRIPTS = [path for path in SCRIPTS if path.parent.name != "peers"]  # these import other trainers
REPLACING = ("monkeypatch.setattr", "mock.patch.object")


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_it_imports_and_replaces_only_what_exists(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(path.parent), *sys.path])
    module = load(path, monkeypatch)
    for call in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)):
        if ast.unparse(call.func) in REPLACING:
            owner, name = call.args[:2]
            assert isinstance(name, ast.Constant)
            found = eval(ast.unparse(owner), vars(module))
            assert hasattr(found, name.value), f"line {call.lineno}: {ast.unparse(owner)} has no {name.value}"


def load(path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"script_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, module.__name__, module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_stages_of_a_start_are_hooked_to_names_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    """`bench/startup.py` would leave out a stage whose function has another name now."""
    from paceline.training import build, step

    hooks = load(ROOT / "bench" / "stages" / "sitecustomize.py", monkeypatch)
    hooked: list[str] = []

    def behind(owner: object, name: str, *_: object) -> None:
        assert hasattr(owner, name)
        hooked.append(name)

    vars(hooks)["_behind"] = behind
    hooks._after_build(build)
    hooks._after_step(step)
    assert hooked == ["load_data", "build", "__call__"]
    assert "TrainStep" in vars(step)
