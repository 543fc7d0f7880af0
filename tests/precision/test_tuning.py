"""Tiles: what a choice is kept under, the cache's files, when anything is measured, that no bit depends on a tile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from narrowgate import precision
from narrowgate.precision.delayed import AmaxHistory
from narrowgate.precision.errors import NarrowgateError
from narrowgate.precision.kernels import tile_cache, tuning
from narrowgate.precision.kernels.program import IDENTITY, Program
from narrowgate.precision.kernels.reference import reference_cast, reference_delayed_cast

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu")
QUESTION = tuning.Question("cast", IDENTITY, "fp8_e4m3/row", "", "bfloat16", "", "aligned", (256, 512))
USUAL = tuning.CAST_CANDIDATES[0]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A device whose candidates take no time, with a cache of its own: (folder, rows measured)."""
    asked = []

    def measured(works, device):
        asked.append(list(works))
        return {tile: float(place != 2) for place, tile in enumerate(works)}

    monkeypatch.setenv("NARROWGATE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tuning, "device_name", lambda device: "Some GPU 9.0")
    monkeypatch.setattr(tuning, "measured", measured)
    monkeypatch.setattr(tile_cache, "version", lambda package: "3.6.0")
    monkeypatch.setattr(tile_cache, "_warned", False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(tuning, "_mode", "on")
    tuning._choices.cache_clear()
    yield tmp_path, asked
    tuning._choices.cache_clear()


def choose(question=QUESTION):
    return tuning.choose(DEVICE, [(question, USUAL)], lambda tiles: lambda: None)


def test_a_cast_that_sums_has_questions_of_its_own_and_others_ask_what_they_asked():
    pytest.importorskip("triton")
    from narrowgate.precision.kernels.launch import Operand, _Cast
    from narrowgate.precision.spec import Spec

    def layouts(*, summed: bool) -> list[str]:
        x, rows = torch.empty(256, 512, dtype=torch.bfloat16, device="meta"), Operand(Spec.parse("fp8_e4m3/row"))
        cast = _Cast(Program.parse(IDENTITY), [x], rows, None, False, None, False, None, summed)
        return [question.layout for question, _ in cast.questions]

    assert layouts(summed=False) == ["aligned even"] * 2
    assert layouts(summed=True) == ["aligned even summed"] * 2


def test_what_is_measured_once_is_known_to_the_next_process(cache):
    folder, asked = cache
    best = QUESTION.candidates(USUAL)[2]
    assert choose() == ({"cast": best}, True)
    tuning._choices.cache_clear()
    for mode in ("on", "cached"):
        assert tuning.autotune(mode)
        assert choose() == ({"cast": best}, True)
    assert len(asked) == 1
    assert sorted(path.suffix for path in folder.iterdir()) == [".json", ".lock"]


@pytest.mark.parametrize("mode", ["off", "cached"])
def test_nothing_is_measured_unasked(cache, mode):
    tuning.autotune(mode)
    assert choose() == ({}, True)
    assert cache[1] == []


def test_off_ignores_what_is_kept(cache):
    choose()
    tuning.autotune("off")
    assert choose() == ({}, True)


def test_nothing_is_measured_while_a_graph_is_captured(cache, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert choose() == ({}, False)
    assert cache[1] == []
    assert choose()[0]


def test_a_changed_kernel_or_triton_is_measured_anew_and_the_old_choice_stays(cache, monkeypatch):
    choose()
    monkeypatch.setattr(tile_cache, "version", lambda package: "3.7.0")
    tuning._choices.cache_clear()
    choose()
    monkeypatch.setattr(tile_cache, "_source", lambda: "edited")
    tuning._choices.cache_clear()
    choose()
    assert len(cache[1]) == 3
    (path,) = cache[0].glob("*.json")
    assert len(json.loads(path.read_text())["sections"]) == 3


@pytest.mark.parametrize("change", [
    {"kernel": "amax"}, {"program": "mn;neg 0|1"}, {"rows": "fp8_e4m3/row+sr"}, {"columns": "="}, {"leaves": "float32"},
    {"history": "16 recording"}, {"layout": "aligned even"}, {"shape": (512, 512)}, {"blocks": (True, False)},
], ids=lambda change: next(iter(change)))  # fmt: skip
def test_each_part_of_a_question_is_part_of_its_key(change):
    assert replace(QUESTION, **change).key != QUESTION.key


@pytest.mark.parametrize("content", ["", "{", "[]", '{"device": "Some GPU 9.0", "sections": {"a": 1}}', "\x00"])
def test_a_broken_cache_costs_one_warning_and_is_written_anew(cache, content):
    path = cache[0] / "casts-some-gpu-9.0.json"
    path.write_text(content)
    with pytest.warns(RuntimeWarning, match=r"not read: .*casts-some-gpu-9\.0\.json") as seen:
        assert choose()[0]
    assert len(seen) == 1
    assert json.loads(path.read_text())["device"] == "Some GPU 9.0"


def test_a_cache_that_cannot_be_written_costs_one_warning(cache, monkeypatch):
    (cache[0] / "file").touch()
    monkeypatch.setenv("NARROWGATE_CACHE_DIR", str(cache[0] / "file"))
    questions = [(replace(QUESTION, shape=(rows, 512)), USUAL) for rows in (1, 2)]
    with pytest.warns(RuntimeWarning, match="tuned tiles are not") as seen:
        assert tuning.choose(DEVICE, questions, lambda tiles: lambda: None)[0]
    assert len(seen) == 1


def test_a_kept_tile_that_is_no_candidate_is_not_taken(cache):
    choose()
    (path,) = cache[0].glob("*.json")
    found = json.loads(path.read_text())
    next(iter(found["sections"].values()))[QUESTION.key]["tile"] = [48, 7, 1, 3]
    path.write_text(json.dumps(found))
    tuning._choices.cache_clear()
    tuning.autotune("cached")
    assert choose() == ({}, True)


def test_ranks_that_write_at_once_lose_nothing(cache):
    ranks = [tile_cache.Choices("Some GPU 9.0", cache[0]) for _ in range(8)]

    def write(rank):
        for i in range(5):
            ranks[rank].keep(f"{rank} {i}", USUAL, {USUAL: 1.0})

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(8)))
    assert len(tile_cache.Choices("Some GPU 9.0", cache[0]).known) == 40


def test_the_users_choice_comes_after_the_shipped_one_and_other_devices_are_ignored(cache):
    shipped = cache[0] / "choices"
    shipped.mkdir()
    for device in ("Some GPU 9.0", "Other GPU 9.0"):
        content = {"device": device, "sections": {tile_cache.section(): {device: {"tile": list(USUAL)}}}}
        (shipped / f"{device[:4]}.json").write_text(json.dumps(content))
    own = tile_cache.Choices("Some GPU 9.0", cache[0], shipped)
    assert set(own.known) == {"Some GPU 9.0"}
    other = tuning.CAST_CANDIDATES[1]
    own.keep("Some GPU 9.0", other, {})
    assert tile_cache.Choices("Some GPU 9.0", cache[0], shipped).find("Some GPU 9.0", [USUAL, other]) == other


def test_the_mode_comes_from_the_environment_once_and_is_checked(monkeypatch):
    monkeypatch.setattr(tuning, "_mode", None)
    monkeypatch.setenv("NARROWGATE_AUTOTUNE", "of")
    with pytest.raises(NarrowgateError, match="NARROWGATE_AUTOTUNE: found 'of', expected off, cached, on"):
        precision.autotune()
    monkeypatch.setenv("NARROWGATE_AUTOTUNE", "on")
    assert precision.autotune("off") == "on"
    assert precision.autotune() == "off"
    with pytest.raises(NarrowgateError, match="autotune: found 'yes'"):
        precision.autotune("yes")


CASTS = {
    "tensor": ("fp8_e4m3", "="), "row": ("fp8_e4m3/row", "fp8_e5m2/row"), "1x128": ("fp8_e4m3/1x128", "fp8_e4m3/1x128"),
    "1x128 rows": ("fp8_e4m3/1x128", ""), "128x128": ("fp8_e4m3/128x128", "="),
    "sr": ("fp8_e5m2+sr", "fp8_e4m3/row+sr"),
    "rms": ("fp8_e4m3+clip(rms=2)", "fp8_e5m2/row+clip(rms=1)"), "delayed": ("fp8_e4m3+delayed(4)", "="),
}  # fmt: skip


def equal(found, expected):
    return all(
        a.shape == b.shape
        and torch.equal(a.reshape(-1).contiguous().view(torch.uint8), b.reshape(-1).contiguous().view(torch.uint8))
        for a, b in zip(found, expected, strict=True)
    )


@pytest.mark.skipif(not INTERPRETED, reason="runs kernels in Triton's interpreter (TRITON_INTERPRET=1)")
@pytest.mark.parametrize("shape", [(150, 200), (131, 67)], ids=str)
@pytest.mark.parametrize("name", CASTS)
def test_no_bit_depends_on_a_tile(name, shape, monkeypatch):
    from narrowgate.precision.kernels import launch

    # Several tiles a program even where the matrix is small.
    monkeypatch.setattr(launch, "AMAX_PROGRAMS", 1)
    monkeypatch.setattr(launch, "CAST_PROGRAMS", 1)
    rows, columns = CASTS[name]
    x = (torch.randn(shape) * torch.exp(3 * torch.randn(shape))).to(torch.bfloat16)
    keys = [torch.tensor(seed) for seed in (11, 12)]
    first = launch.Operand(precision.Spec.parse(rows))
    second = launch.Operand(precision.Spec.parse(columns)) if columns not in ("", "=") else None
    program, history = Program.parse(IDENTITY), None
    if first.spec.delayed:
        history = AmaxHistory(4)
        expected = reference_delayed_cast([x], program, first.spec, True, True, None, state(history), True)
    else:
        expected = reference_cast([x], program, rows, columns, *[(key, None) for key in keys])
    length = history and 4
    usual = launch._Cast(program, [x], first, second, columns == "=", length, True)
    for question, tile in usual.questions:
        for candidate in question.candidates(tile):
            tiles = {question.kernel: candidate}
            cast = launch._Cast(program, [x], first, second, columns == "=", length, True, tiles)
            assert cast.launched_tiles()[question.kernel][:2] == candidate[:2]
            found = cast.run([x], (None, None), keys, (None, None), state(history) if history else None)
            if history:
                found = found[0], found[2], found[1]
            assert equal(found, expected), candidate


def state(history):
    return AmaxHistory(4).history, *(t.clone() for t in (history.pending, history.saturated, history.workspace))


#: A process that casts, and says what came out and with which tiles.
PROCESS = """
import hashlib, json, torch
from narrowgate.precision.kernels import launch
import narrowgate.precision.cast_operators
torch.manual_seed(0)
x = torch.randn(300, 512, device="cuda").bfloat16()
found = torch.ops.narrowgate.cast_fp8([x], "mn|0", "fp8_e4m3/row", "fp8_e4m3/row", *[None] * 6)
bits = b"".join(t.contiguous().view(torch.uint8).cpu().numpy().tobytes() for t in found)
print(json.dumps([hashlib.sha256(bits).hexdigest(), launch.last_tiles()]))
"""


@pytest.mark.gpu
def test_a_tuned_choice_reaches_another_process_and_changes_no_bit(tmp_path):
    def cast(mode):
        environment = {**os.environ, "NARROWGATE_AUTOTUNE": mode, "NARROWGATE_CACHE_DIR": str(tmp_path)}
        command = [sys.executable, "-c", PROCESS]
        return json.loads(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)

    plain, tuned = cast("off"), cast("on")
    (path,) = tmp_path.glob("*.json")
    written = path.read_text()
    (choices,) = json.loads(written)["sections"].values()
    assert {key.split(" ; ")[0] for key in choices} == {"amax", "cast"}
    assert cast("cached") == tuned
    assert path.read_text() == written
    assert tuned[0] == plain[0]
    for key, entry in choices.items():
        assert tuned[1][key.split(" ; ")[0]][:2] == entry["tile"][:2]


def test_choices_that_are_shipped_serve_whoever_has_measured_nothing(cache, tmp_path_factory, monkeypatch):
    monkeypatch.setattr(tile_cache, "device_name", lambda device: "Some GPU 9.0")
    folder, asked = cache
    best = choose()[0]["cast"]
    shipped = tmp_path_factory.mktemp("choices") / "new"
    path = tile_cache.ship_choices(DEVICE, shipped)
    assert "us" not in path.read_text()
    elsewhere = tile_cache.Choices("Some GPU 9.0", folder / "nothing here", shipped)
    assert elsewhere.find(QUESTION.key, QUESTION.candidates(USUAL)) == best
    assert len(asked) == 1
