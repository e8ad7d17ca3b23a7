"""The structure: who may import whom."""

import ast
import pathlib

import pytest

PACKAGE = pathlib.Path(__file__).parent.parent / "clusterjax"
STAGES = ("data", "features", "clustering", "selection", "allocation", "train")
# The trainer and the features use models and the loss; nothing else crosses.
BOTTOM = ("datatypes", "errors", "files", "config")


def _imports(path: pathlib.Path) -> set[str]:
    """Top-level names under clusterjax, and outside packages, that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            names = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            parts = name.split(".")
            inside = parts[0] == "clusterjax" and len(parts) > 1
            found.add(f"clusterjax.{parts[1]}" if inside else parts[0])
    return found


def _files(name: str) -> list[pathlib.Path]:
    single = PACKAGE / f"{name}.py"
    return [single] if single.exists() else sorted((PACKAGE / name).rglob("*.py"))


@pytest.mark.parametrize("stage", STAGES)
def test_stages_do_not_import_one_another(stage):
    paths = _files(stage)
    assert paths
    others = {f"clusterjax.{name}" for name in STAGES if name != stage}
    for path in paths:
        assert not _imports(path) & others, path


@pytest.mark.parametrize("name", ["selection", "allocation", "batching", "packing"])
def test_planners_do_not_import_jax(name):
    paths = _files(name)
    assert paths
    for path in paths:
        assert not _imports(path) & {"jax", "flax", "optax"}, path


@pytest.mark.parametrize("name", BOTTOM)
def test_bottom_modules_import_no_stage(name):
    for path in _files(name):
        assert not _imports(path) & {f"clusterjax.{stage}" for stage in STAGES}, path


def test_library_needs_neither_the_experiments_nor_heavy_frameworks():
    for path in PACKAGE.rglob("*.py"):
        banned = {"experiments", "configs", "tensorflow", "torch", "transformers"}
        assert not _imports(path) & banned, path


def test_no_file_names_that_say_nothing():
    folders = (PACKAGE, PACKAGE.parent / "experiments", PACKAGE.parent / "tests")
    names = {path.stem for folder in folders for path in folder.rglob("*.py")}
    assert not names & {"utils", "helpers", "misc", "common"}
