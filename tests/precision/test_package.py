"""The package as others import it: lazily, and with names that mean one thing."""

from __future__ import annotations

import json
import pkgutil
import shutil
import subprocess
import sys
from pathlib import Path

import narrowgate.precision as package
import pytest

ROOT = Path(__file__).parents[2]
#: Prints the files that a wheel has beside modules, as places in the tree that is built.
LIST_DATA = """
import json, os
from setuptools import Distribution
built = Distribution({"script_name": "setup.py"})
built.parse_config_files(["pyproject.toml"])
step = built.get_command_obj("build_py")
step.ensure_finalized()
print(json.dumps([os.path.relpath(os.path.join(at, name)) for _, at, _, names in step.data_files for name in names]))
"""


def test_importing_the_package_does_not_import_torch():
    code = "import sys, narrowgate.precision as p; p.Spec.parse('nvfp4+sr'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", package.__all__)
def test_every_public_name_loads(name):
    assert getattr(package, name) is not None
    assert name in dir(package)


def test_no_public_name_is_a_submodule():
    # Importing a submodule binds its name in the package: a function of the same name would be gone from then on.
    assert not {module.name for module in pkgutil.iter_modules(package.__path__)} & set(package.__all__)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'quantise'"):
        package.quantise  # noqa: B018


def test_a_wheel_has_the_files_that_modules_read_and_chosen_tiles_where_there_are_any(tmp_path):
    pytest.importorskip("setuptools", minversion="77")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("precision", "recipes", "models", "gates"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    choices = tmp_path / "precision" / "kernels" / "choices"
    choices.mkdir(exist_ok=True)
    (choices / "Some GPU 9.0.json").write_text("{}")
    command = [sys.executable, "-c", LIST_DATA]
    listed = subprocess.run(command, cwd=tmp_path, check=False, capture_output=True, text=True)
    assert listed.returncode == 0, listed.stderr
    read = {"precision/kernels/choices/Some GPU 9.0.json", "gates/report.schema.json", "recipes/recipe.schema.json"}
    assert read <= set(json.loads(listed.stdout.splitlines()[-1]))
