"""The wheel, installed into an environment that has nothing else, does what the checkout does."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.slow


def run(*command, cwd):
    """Run a program away from the checkout and return its standard output."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT, cwd=folder)
    [path] = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The folder of the programs of an environment with the wheel in it."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder / "env", with_pip=True)
    programs = folder / "env" / ("Scripts" if os.name == "nt" else "bin")
    run(programs / "python", "-m", "pip", "install", "--quiet", wheel, cwd=folder)
    return programs


def test_the_wheel_is_pure_and_holds_the_package_and_nothing_else(wheel):
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    [metadata] = {name.partition("/")[0] for name in names} - {"shardset"}
    assert metadata.endswith(".dist-info")
    assert "shardset/py.typed" in names
    assert f"{metadata}/licenses/LICENSE" in names
    sources = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src" / "shardset").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == sources


def test_the_installed_package_is_the_one_from_the_wheel(installed, tmp_path):
    where = run(installed / "python", "-c", "import shardset; print(shardset.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(installed.parent)


def test_the_installed_program_and_the_module_tell_the_same_version(installed, tmp_path):
    version = run(installed / "python", "-c", "import shardset; print(shardset.__version__)", cwd=tmp_path).strip()
    assert version in run(installed / "shardset", "--version", cwd=tmp_path)
    assert version in run(installed / "python", "-m", "shardset", "--version", cwd=tmp_path)


def test_the_core_of_the_demo_runs_from_the_wheel(installed, tmp_path):
    shown = run(installed / "python", ROOT / "examples" / "demo.py", "--core", cwd=tmp_path)
    assert "astronaut" in shown
