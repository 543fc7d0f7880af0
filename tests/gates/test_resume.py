"""Finished trainings are kept and reused; what does not fit or is damaged is not."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from narrowgate.gates import resume, train
from narrowgate.gates.batches import weights_fingerprint
from narrowgate.gates.files import ROOM
from narrowgate.gates.task import TaskSource
from narrowgate.recipes import load_recipe

CPU = torch.device("cpu")
GATE = ("gate", "all-fp8.yaml", "--task", "ranker:paced", "--seeds", "2", "--device", "cpu")


def quiet(*_: Any) -> None:
    pass


def reuse(room: Path) -> dict[str, Any]:
    return json.loads((room / "reports" / "report.json").read_text())["reuse"]


def test_a_run_that_was_killed_goes_on_where_it_stopped(room: Path, narrowgate) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "narrowgate.gates", *GATE, "-q"], cwd=room, start_new_session=True
    )
    kept = room / "reports" / ".seeds"
    until = time.monotonic() + 60
    while not list(kept.glob("candidate-*.npz")):
        assert time.monotonic() < until
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not (room / "reports" / "report.json").exists()
    finished = {kind: len(list(kept.glob(f"{kind}-*.npz"))) for kind in ("baseline", "candidate")}
    damaged = next(kept.glob("baseline-*.npz"))
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 0xFF
    damaged.write_bytes(data)

    code, _, err = narrowgate(*GATE)
    assert code == 3
    assert "4 of 4 trainings" in err
    found = reuse(room)
    assert found == {
        "trainings": 4,
        "baseline": finished["baseline"] - 1,
        "candidate": finished["candidate"],
        "notes": [f"ignored a damaged file of a finished training: {damaged.name}"],
    }
    report = json.loads((room / "reports" / "report.json").read_text())
    assert sum(seed["candidate"]["reused"] for seed in report["measurements"]["seeds"]) == finished["candidate"]
    # Once the report stands, only baselines are kept: the next recipe needs them.
    assert {path.name.partition("-")[0] for path in kept.iterdir()} == {"baseline", "looked"}
    assert len(list(kept.glob("baseline-*"))) == 2


def test_fresh_forgets_what_was_kept(room: Path) -> None:
    from narrowgate.gates.cli_gate import _store

    kept = room / "reports" / ".seeds"
    kept.mkdir(parents=True)
    (kept / "baseline-0-x.npz").write_text("")
    assert list(_store(room / "reports", fresh=False).iterdir())
    assert not _store(room / "reports", fresh=True).exists()


def test_more_seeds_after_a_look_are_said_to_pool_it(room: Path, measure) -> None:
    from narrowgate.gates.render import quality_lines

    store = room / "reports" / ".seeds"
    assert measure(seeds=1, steps=5, store=store).reuse.notes == ()
    assert measure(seeds=1, steps=5, store=store).reuse.notes == ()  # the same seeds again are no further look
    resume.forget(store)
    again = measure(seeds=2, steps=5, store=store)
    (note,) = again.reuse.notes
    assert note.startswith("1 earlier run into this folder looked at the first 1 seeds, and this one at 2:")
    assert note in quality_lines(again)
    (note,) = measure(seeds=1, steps=5, store=store).reuse.notes
    assert note.startswith("1 earlier run into this folder looked at the first 2 seeds, and this one at 1:")


def test_another_recipe_reuses_the_baselines_and_gets_the_same(room: Path, measure) -> None:
    store = room / "reports" / ".seeds"
    first = measure(seeds=2, steps=5, store=store)
    resume.settle(store)
    other = measure(seeds=2, steps=5, store=store, recipe="bf16")
    assert (other.reuse.baseline, other.reuse.candidate) == (2, 0)
    assert other.reuse.notes == ()
    alone = measure(seeds=2, steps=5, recipe="bf16")
    assert alone.reuse.baseline == 0
    for reused, trained in zip(other.measurements.seeds, alone.measurements.seeds, strict=True):
        assert reused.baseline.quality == trained.baseline.quality
        assert reused.candidate.quality == trained.candidate.quality
    assert first.reuse.baseline == 0


@pytest.fixture
def source(room: Path) -> TaskSource:
    return TaskSource(task="ranker:good", device="cpu", steps=6)


def store_of(source: TaskSource, folder: Path) -> resume.SeedStore:
    task = source.open()
    train.seed_generators(0)
    return resume.open_store(folder, source, task, weights_fingerprint(task.build_model()))


def test_what_comes_back_is_what_was_kept(room: Path, source: TaskSource) -> None:
    store = store_of(source, room / "kept")
    arm = train.Arm(source.open(), CPU, load_recipe("all-fp8.yaml"), steps=6, observe_every=2)
    first = store.train(arm, 4, quiet)
    told = []
    second = store.train(arm, 4, lambda *step: told.append(step))
    assert not first.reused
    assert second.reused
    assert told == [(6, 6, float(first.losses[-1]))]
    assert replace(second, reused=False, **_arrays(first)) == first
    for name, value in _arrays(first).items():
        np.testing.assert_array_equal(getattr(second, name), value)
    assert second.observed.operands


def _arrays(trained: train.Trained) -> dict[str, Any]:
    return {name: value for name, value in vars(trained).items() if isinstance(value, np.ndarray)}


@pytest.mark.parametrize("change", ["recipe", "backend", "seed", "steps", "watching", "task", "weights"])
def test_whatever_a_training_follows_from_is_part_of_its_key(room: Path, source: TaskSource, change: str) -> None:
    store = store_of(source, room / "kept")
    arm = train.Arm(source.open(), CPU, load_recipe("all-fp8.yaml"), "native", steps=6, observe_every=2)
    seed, other = 0, arm
    if change == "task":
        path = room / "ranker.py"
        path.write_text(path.read_text() + "\n# another line\n")
        assert store_of(source, room / "kept") != store
        return
    if change == "weights":
        assert resume.open_store(room / "kept", source, source.open(), "other weights") != store
        return
    if change == "recipe":
        text = (room / "all-fp8.yaml").read_text().replace("fprop: fp8_e4m3", "fprop: fp8_e5m2")
        (room / "other.yaml").write_text(text)
        other = replace(arm, recipe=load_recipe("other.yaml"))
    elif change == "backend":
        other = replace(arm, backend="torchao")
    elif change == "seed":
        seed = 1
    elif change == "steps":
        other = replace(arm, steps=5)
    else:
        other = replace(arm, observe_every=3)
    assert store._place(other, seed) != store._place(arm, 0)
    assert store_of(source, room / "kept") == store


@pytest.mark.parametrize("setting", ["dropout", "loss scale", "third loss"])
def test_what_a_task_reads_from_a_file_is_found_out_by_its_first_losses(room: Path, measure, setting: str) -> None:
    path = room / "ranker.py"
    text = path.read_text().replace("nn.Dropout(0.1)", "nn.Dropout(SETTINGS['dropout'])")
    text = text.replace(
        "return loss if self.fault is None",
        "loss = loss * SETTINGS['loss scale']\n        if step == 3:\n"
        "            loss = loss * SETTINGS['third loss']\n        return loss if self.fault is None",
    )
    path.write_text(
        text.replace("class Ranker", "import json\nSETTINGS = json.load(open('settings.json'))\n\n\nclass Ranker", 1)
    )
    settings = {"dropout": 0.1, "loss scale": 1.0, "third loss": 1.0}
    (room / "settings.json").write_text(json.dumps(settings))
    store = room / "reports" / ".seeds"
    assert measure(seeds=2, steps=5, store=store).reuse.baseline == 0
    resume.settle(store)
    sys.modules.pop("ranker")
    assert measure(seeds=2, steps=5, store=store).reuse.baseline == 2
    resume.settle(store)
    sys.modules.pop("ranker")
    (room / "settings.json").write_text(json.dumps(settings | {setting: 0.5}))
    again = measure(seeds=2, steps=5, store=store)
    assert again.reuse.baseline == 0
    assert [note.partition(" was not used")[0] for note in again.reuse.notes] == [
        f"a kept training of the baseline under seed {seed}" for seed in (0, 1)
    ]


def test_a_later_batch_that_changed_ends_the_run_with_what_helps(room: Path, measure) -> None:
    path = room / "ranker.py"
    path.write_text(path.read_text().replace("        x, y = rows(100 + seed, 64 * self.count)\n", (
        "        x, y = rows(100 + seed, 64 * self.count)\n        y[64 * 4] = float(os.environ.get('LABEL', '0'))\n"
    )))  # fmt: skip
    store = room / "reports" / ".seeds"
    with pytest.MonkeyPatch.context() as changed:
        changed.setenv("LABEL", "1")
        measure(seeds=2, steps=5, store=store)
    resume.settle(store)
    # Each time: what the failed run kept makes it no better.
    for _ in range(2):
        with pytest.raises(train.RunError, match=r"yielded other batches .* earlier run into this folder .*--fresh"):
            measure(seeds=2, steps=5, store=store)


def test_held_out_batches_that_changed_end_the_run_with_what_helps(room: Path, measure) -> None:
    path = room / "ranker.py"
    path.write_text(path.read_text().replace('            {"x": x[1200:],', (
        '            {"x": x[1200:1600], "y": y[1200:1600], "user": 300 + torch.arange(400) // 4},\n'
        '            {"x": x[1600:] * float(os.environ.get("SCALE", "1")), "y": y[1600:],\n'
        '             "user": 400 + torch.arange(400) // 4},\n'
        '        ]\n        [\n            {"x": x[1200:],'
    )))  # fmt: skip
    store = room / "reports" / ".seeds"
    measure(seeds=2, steps=5, store=store)
    resume.settle(store)
    with pytest.MonkeyPatch.context() as changed:
        changed.setenv("SCALE", "2")
        with pytest.raises(train.RunError, match=r"eval_batches\(\) yielded other rows .*--fresh"):
            measure(seeds=2, steps=5, store=store)


@pytest.mark.parametrize(
    "place", ["elsewhere/towers/ranking.py", "elsewhere/towers/parts.py", "elsewhere/rates.py", "elsewhere/late.py"]
)
def test_the_source_of_what_a_task_has_from_elsewhere_is_part_of_its_key(
    room: Path, source: TaskSource, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.syspath_prepend(str(room / "elsewhere"))
    (room / "elsewhere" / "towers").mkdir(parents=True)
    (room / "elsewhere" / "towers" / "__init__.py").write_text("")
    (room / "elsewhere" / "towers" / "parts.py").write_text("SCALE = 1\n")
    (room / "elsewhere" / "towers" / "ranking.py").write_text("import towers.parts\n\n\ndef scale():\n    return 1\n")
    (room / "elsewhere" / "rates.py").write_text("RATE = 1\n")
    (room / "elsewhere" / "late.py").write_text("LATE = 1\n")
    (room / "task").mkdir()
    lines = ["from ranker import good", "from rates import RATE", "from towers.ranking import scale"]
    lines += ["def later():", "    import late", "later()"]
    (room / "task" / "own.py").write_text("\n".join(lines) + "\n")
    monkeypatch.syspath_prepend(str(room / "task"))
    source = replace(source, task="own:good")
    try:
        before = store_of(source, room / "kept")
        assert store_of(source, room / "kept") == before
        (room / place).write_text((room / place).read_text() + "# changed\n")
        assert store_of(source, room / "kept") != before
    finally:
        for name in ("own", "rates", "late", "towers", "towers.parts", "towers.ranking"):
            sys.modules.pop(name, None)


@pytest.mark.parametrize("damage", ["cut", "emptied", "no archive", "of another key"])
def test_a_damaged_file_is_ignored_and_said_so(room: Path, source: TaskSource, damage: str) -> None:
    store = store_of(source, room / "kept")
    arm = train.Arm(source.open(), CPU, steps=6)
    store.train(arm, 0, quiet)
    (path,) = (room / "kept").iterdir()
    data = path.read_bytes()
    if damage == "of another key":
        store.train(arm, 1, quiet)
        (other,) = (p for p in (room / "kept").iterdir() if p != path)
        data = other.read_bytes()
    path.write_bytes({"cut": data[:-200], "emptied": b"", "no archive": b"PK\3\4" + b"?" * 50}.get(damage, data))
    again = store.train(arm, 0, quiet)
    assert not again.reused
    assert again.notes == (f"ignored a damaged file of a finished training: {path.name}",)
    assert store.train(arm, 0, quiet).reused


def test_whatever_bit_of_a_kept_file_flips_it_is_whole_or_ignored(room: Path, source: TaskSource) -> None:
    """Headers of archive, entries and arrays above all: nothing else reads what they say."""
    store = store_of(source, room / "kept")
    arm = train.Arm(source.open(), CPU, steps=6)
    kept = store.train(arm, 0, quiet)
    (path,) = (room / "kept").iterdir()
    data = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        starts = [entry.header_offset for entry in archive.infolist()]
        directory = archive.start_dir
    places = [at for start in starts for at in range(start, start + 200, 3)] + list(range(directory, len(data), 7))
    generator = random.Random(1)
    ignored = 0
    for place in places:
        changed = bytearray(data)
        changed[place % len(data)] ^= 1 << generator.randrange(8)
        path.write_bytes(changed)
        found, note = store.find(arm, 0)
        assert (found is None) == (note is not None)
        if found is None:
            assert note == f"ignored a damaged file of a finished training: {path.name}"
            ignored += 1
        else:
            for name, value in _arrays(kept).items():
                np.testing.assert_array_equal(getattr(found, name), value)
    assert ignored > len(places) / 2


def test_room_for_the_report_is_left_on_a_disk_that_fills(
    room: Path, source: TaskSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_of(source, room / "kept")
    arm = train.Arm(source.open(), CPU, steps=6)
    free = ROOM + 2**20
    monkeypatch.setattr(resume.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    assert store.train(arm, 0, quiet).notes == ()
    free = ROOM
    assert store.train(arm, 1, quiet).notes == ("finished trainings could not be kept: No space left on device",)
    assert [path.name.split("-")[1] for path in (room / "kept").iterdir()] == ["0"]


def test_a_full_disk_costs_only_what_would_have_been_kept(
    room: Path, source: TaskSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    store = store_of(source, room / "kept")
    monkeypatch.setattr(np, "savez", full)
    trained = store.train(train.Arm(source.open(), CPU, steps=6), 0, quiet)
    assert len(trained.losses) == 6
    assert trained.notes == ("finished trainings could not be kept: No space left on device",)
    assert list((room / "kept").iterdir()) == []


def test_only_so_many_baselines_are_kept(tmp_path: Path) -> None:
    for i in range(70):
        (tmp_path / f"baseline-{i}-x.npz").write_text("")
        os.utime(tmp_path / f"baseline-{i}-x.npz", (i, i))
    (tmp_path / "candidate-0-x.npz").write_text("")
    (tmp_path / ".abc.part").write_text("")
    resume.settle(tmp_path)
    left = sorted(int(path.name.split("-")[1]) for path in tmp_path.iterdir())
    assert left == list(range(6, 70))
    resume.settle(tmp_path / "absent")
    resume.forget(tmp_path)
    assert not tmp_path.exists()
