"""scripts/get_data, without a network: what is there, what is in the way, what is unknown."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "get_data"


def run(*arguments: object, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_unknown_set_is_named_with_the_known_ones(tmp_path: Path) -> None:
    ran = run("ml100k", folder=tmp_path)
    assert ran.returncode == 2
    assert ran.stderr == "get_data: error: unknown data set 'ml100k'; did you mean 'ml-100k'? (known: ml-100k)\n"


def test_a_folder_with_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    ran = run("ml-100k", "mine", folder=tmp_path)
    assert ran.returncode == 1
    assert "exists but lacks ml-100k.inter: remove it, or name another folder" in ran.stderr
    assert (tmp_path / "mine" / "notes.txt").read_text() == "keep"


def test_altered_files_are_found_out(tmp_path: Path) -> None:
    for name in ("inter", "item", "user"):
        (tmp_path / f"ml-100k.{name}").write_text("x")
    ran = run("ml-100k", tmp_path, folder=tmp_path)
    assert ran.returncode == 1
    assert "ml-100k.inter is not what it should be: SHA-256 2d711642" in ran.stderr
    assert ran.stderr.count("\n") == 1


def test_a_second_run_says_it_is_there(real: Callable[[str], Path], tmp_path: Path) -> None:
    source, target = real("ml-100k"), tmp_path / "ml-100k"
    target.mkdir()
    for name in ("inter", "item", "user"):
        shutil.copyfile(source / f"ml-100k.{name}", target / f"ml-100k.{name}")
    ran = run("ml-100k", "ml-100k", folder=tmp_path)
    assert (ran.returncode, ran.stdout) == (0, f"MovieLens-100K is there already: {target}\n")
