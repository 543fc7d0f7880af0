"""The package as others import it: lazily, and with names that mean one thing."""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import narrowgate.precision as package
import pytest


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
