"""The script that sets a model beside simpler ones: what --set makes of a preset, and what it refuses."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from narrowgate.models import get_preset

pytest.importorskip("sklearn")
SCRIPT = Path(__file__).parents[2] / "scripts" / "quality_table"


@pytest.fixture(scope="module")
def script() -> dict:
    return runpy.run_path(str(SCRIPT))


def test_fields_of_model_and_training_are_set(script: dict) -> None:
    preset = get_preset("gem-tiny")
    found = script["changed"](preset, ["first_order=true", "lr=1", "window=4", "fm_hidden=(16, 8)", "table_lr=0.02"])
    assert found.model.first_order is True
    assert (found.training.lr, found.training.table_lr) == (1, 0.02)
    assert (found.model.window, found.model.fm_hidden) == (4, (16, 8))
    assert script["changed"](found, ["window=none"]).model.window is None
    assert script["changed"](preset, ["experts=1", "expert_top=1"]).model.experts == 1  # only together do they fit
    assert script["changed"](preset, []) == preset


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("lr", "found 'lr', expected FIELD=VALUE"),
        ("first_orde=true", "did you mean 'first_order'?"),
        ("lr=fast", "found lr=fast, expected float"),
        ("first_order=1", "found first_order=1, expected bool"),
        ("lr=none", "found lr=none, expected float"),
        ("steps=true", "found steps=true, expected int"),
        ("window=2.5", "found window=2.5, expected int | None"),
        ("fm_hidden=(16, 'a')", "found fm_hidden=(16, 'a'), expected tuple[int, ...]"),
        ("betas=(0.9,)", "found betas=(0.9,), expected tuple[float, float]"),
        ("balance=abc", "found balance=abc, expected "),
        ("lr=0", "training field 'lr' must be positive, found 0"),
        ("batch_size=0", "training field 'batch_size' must be at least 1, found 0"),
        ("eval_batch_size=0", "training field 'eval_batch_size' must be at least 1, found 0"),
        ("first_order_decay=1", "training field 'first_order_decay' must lie in [0, 1), found 1"),
        ("dropout=7", "model field 'dropout' must lie in [0, 1), found 7"),
    ],
)
def test_what_cannot_be_set_is_one_line(
    setting: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--model", "gem-tiny", "--set", setting])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("peers", [(), ("mlp",), ("logistic-regression", "mlp")])
def test_the_table_has_the_peers_that_were_asked_for(peers: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    script = runpy.run_path(str(SCRIPT))
    row, known = script["Row"], script["table"].__globals__

    def stands_for(name: str) -> Any:
        return lambda *_: row(name, np.ones((1, 2)), np.ones((1, 2)), 1.0)

    monkeypatch.setitem(known, "PEERS", {name: stands_for(name) for name in script["PEERS"]})
    monkeypatch.setitem(known, "gem", stands_for("gem-tiny"))
    monkeypatch.setitem(known, "one_hot", lambda rows, events: np.ones((1, 1)))
    given = SimpleNamespace(
        model="gem-tiny", set=[], steps=None, device="cpu", seeds=1, peers=peers, kept=None, later=False
    )
    found = [
        line.split("|")[1].strip() for line in script["table"](given, "synthetic").splitlines() if "1.0000" in line
    ]
    assert found == [*peers, "gem-tiny"]


def test_lines_that_are_kept_are_not_made_again(script: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row, known, made = script["Row"], script["table"].__globals__, []

    def peer(*_: Any) -> Any:
        made.append("mlp")
        return row("mlp", np.full((2, 2), 0.75), np.ones((2, 2)), 1.0)

    def model(_: Any, seed: int, *__: Any) -> Any:
        made.append(seed)
        return row("gem-tiny", np.full((1, 2), 0.5 + seed / 8), np.ones((1, 2)), 1.0 + seed)

    monkeypatch.setitem(known, "PEERS", {"mlp": peer})
    monkeypatch.setitem(known, "gem", model)
    monkeypatch.setitem(known, "one_hot", lambda rows, events: np.ones((1, 1)))

    def table(**changed: Any) -> str:
        given = {"model": "gem-tiny", "set": [], "steps": [3], "device": "cpu", "seeds": 2, "peers": ["mlp"]} | changed
        return script["table"](SimpleNamespace(**{"kept": tmp_path, "later": False} | given), "synthetic")

    table(peers=[], seeds=1)
    assert made == [0]
    table(steps=[])
    assert made == [0, "mlp"]
    both = table()
    assert made == [0, "mlp", 1]
    assert "| gem-tiny | 0.5625 ± 0.0884 | 1.0000 ± 0.0000 |" in both
    assert "1.5 |" in both
    assert "gem-tiny on a CPU" in both
    assert "mlp on a CPU" in both
    assert table() == both
    assert made == [0, "mlp", 1]
    one = {"seeds": 1}
    for changed in ({"seeds": 3, "peers": []}, {"steps": [4], "peers": []} | one, {"seeds": 3}, {"later": True} | one):
        table(**changed)
    assert made == [0, "mlp", 1, 2, 0, "mlp", "mlp", 0]


def test_settings_are_chosen_without_the_held_out_rows(
    script: dict, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    preset = get_preset("gem-tiny")
    whole, part = (
        script["opened"](preset, "synthetic", 3, SimpleNamespace(device="cpu", later=later)).data.rows
        for later in (False, True)
    )
    assert sorted([*part.train, *part.held_out]) == sorted(whole.train)
    users = part.groups[part.held_out]
    assert set(users) <= set(part.groups[part.train])
    times = {user: whole.times[part.train][part.groups[part.train] == user].max() for user in set(users)}
    assert all(
        time >= times[user] for user, time in zip(users.tolist(), whole.times[part.held_out].tolist(), strict=True)
    )
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--later", "--write", str(tmp_path / "x.md")])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert ended.value.code == 2
    assert "--later chooses settings" in capsys.readouterr().err
