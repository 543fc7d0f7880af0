from __future__ import annotations

from pathlib import Path

import pytest
from narrowgate.gates.policy import BUILTIN_POLICIES, Policy, load_policy
from narrowgate.precision.errors import NarrowgateError


def test_the_built_in_policies_hold_their_published_margins() -> None:
    strict, standard, loose = (load_policy(name) for name in ("strict", "standard", "loose"))
    assert (strict.max_ne_increase, strict.seeds) == (0.0002, 12)
    assert (standard.max_ne_increase, standard.max_auc_loss, standard.min_speedup) == (0.0005, 0.0005, 1.05)
    assert standard.seeds == 8
    assert loose.max_ne_increase == 0.0025
    assert "not recommender-grade" in loose.description
    assert {p.min_seeds for p in BUILTIN_POLICIES.values()} == {5}


def test_a_file_changes_what_it_names(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "policy: mine\nextends: strict\nmax_ne_increase: 0.03%\nstability: {max_spikes: 2}\n"
        "min_module_speedup: 1.2\nspeed: {module_budget_seconds: 10}\n"
    )
    mine, strict = load_policy(path), load_policy("strict")
    assert mine.max_ne_increase == pytest.approx(0.0003)
    assert mine.stability.max_spikes == 2
    assert mine.stability.spike_factor == strict.stability.spike_factor
    assert mine.seeds == strict.seeds
    assert (mine.min_module_speedup, strict.min_module_speedup) == (1.2, None)
    assert mine.speed.module_budget_seconds == 10
    assert mine.speed.budget_seconds == strict.speed.budget_seconds
    assert load_policy(mine) is mine
    assert isinstance(mine, Policy)


def test_a_file_that_changes_a_policy_is_not_called_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("extends: standard\nmax_ne_increase: 5%\n")
    mine = load_policy(path)
    assert (mine.policy, mine.description) == ("mine.yaml", "standard, changed")
    path.write_text("policy: ours\ndescription: for towers\nextends: standard\n")
    mine = load_policy(path)
    assert (mine.policy, mine.description) == ("ours", "for towers")


@pytest.mark.parametrize(
    ("text", "place", "message"),
    [
        ("policy: x\nextends: standard\nmin_sedes: 5\n", ":3:1: min_sedes:", "did you mean 'min_seeds'"),
        ("policy: x\nextends: standard\nseeds: many\n", ":3:1: seeds:", "found 'many', expected a valid integer"),
        ("policy: x\nextends: standard\nseeds: 0\n", ":3:1: seeds:", "greater than or equal to 1"),
        ("policy: x\nextends: standard\nmin_seeds: 3\n", ":3:1: min_seeds:", "greater than or equal to 5"),
        ("policy: x\nextends: standard\nalpha: five%\n", ":3:1: alpha:", "expected a percentage"),
        ("policy: x\nextends: standart\n", ":2:10: extends:", "did you mean 'standard'"),
        ("policy: x\nmax_auc_loss: 0.1\n", ":1:1: max_ne_increase:", "missing"),
        ("policy: x\nextends: standard\nspeed: {max_quartets: 5}\n", ":3:1: speed:", "below min_quartets 20"),
        (
            "policy: x\nextends: standard\nspeed:\n  halfwidth: 5\n",
            ":4:3: speed.halfwidth:",
            "did you mean 'half_width'",
        ),
        ("policy: x\nextends: standard\nalpha: .nan\n", ":3:1: alpha:", "found '.nan'"),
        ("policy: x\nextends: standard\nseeds: true\n", ":3:1: seeds:", "found true, expected a number"),
        ("policy: x\nextends: standard\nmin_speedup: yes\n", ":3:1: min_speedup:", "found 'yes', expected"),
        ("policy: x\nextends: standard\nmin_speedup: false\n", ":3:1: min_speedup:", "found false, expected a number"),
        ("policy: x\nextends: standard\nspeed: {run_to_run: {sd: true}}\n", ":3:22: speed.run_to_run.sd:", "a number"),
        (
            "policy: x\nextends: standard\nseeds: 8\nlooks: [8, 5]\n",
            ":4:1: looks:",
            "found [8, 5], expected increasing",
        ),
        ("policy: x\nextends: standard\nlooks: [true, 8]\n", ":3:1: looks:", "expected numbers"),
        (
            "policy: x\nextends: standard\ntasks: {click: 5}\n",
            ":3:9: tasks.click:",
            "found 5, expected a mapping of fields",
        ),
        ("policy: x\nextends: standard\nspeed: [1]\n", ":3:1: speed:", "expected a mapping of fields"),
        (
            f"policy: x\nextends: standard\nseeds: {'9' * 5000}\n",
            ":3:1: seeds:",
            "expected a smaller number",
        ),
        ("policy: true\nextends: standard\n", ":1:1: policy:", "expected a valid string"),
        ("policy: x\nextends: standard\nspeed: true\n", ":3:1: speed:", "expected a mapping of fields"),
        ("policy: x\nextends: standard\nlooks: true\n", ":3:1: looks:", "found true, expected"),
        ("policy: strict\nextends: loose\n", ":1:1: policy:", "found 'strict', the name of a built-in policy"),
        ("- a\n", ":1:1:", "expected a mapping"),
        ("policy: {\n", ":2:1:", "not YAML"),
        ("", "", "empty file"),
    ],
)
def test_a_wrong_file_is_one_line_with_its_place(tmp_path: Path, text: str, place: str, message: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(NarrowgateError) as caught:
        load_policy(path)
    assert str(caught.value).startswith(f"{path}{place}")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_says_what_a_built_in_says_may_go_by_its_name(tmp_path: Path) -> None:
    strict = BUILTIN_POLICIES["strict"]
    (tmp_path / "mine.yaml").write_text(f"policy: strict\nextends: strict\ndescription: {strict.description}\n")
    assert load_policy(tmp_path / "mine.yaml") == strict
    for text in (
        "policy: standard\nmax_ne_increase: 0.0005\nmax_auc_loss: 0.0005\n",
        "policy: standard\nextends: standard\n",
    ):
        (tmp_path / "mine.yaml").write_text(text)
        assert load_policy(tmp_path / "mine.yaml").max_ne_increase == 0.0005


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("extends: standart\nmin_sedes: 5\n", [":1:10: extends:", ":2:1: min_sedes:"]),
        ("extends: standard\nextend: strict\nseeds: 0\n", [":3:1: seeds:", ":2:1: extend:"]),
    ],
)
def test_all_faults_of_a_file_are_told_at_once(tmp_path: Path, text: str, lines: list[str]) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(NarrowgateError) as caught:
        load_policy(path)
    told = str(caught.value).splitlines()
    assert sorted(
        line.removeprefix(str(path)).partition(" found")[0].partition(" unknown")[0] for line in told
    ) == sorted(lines)


@pytest.mark.parametrize(
    ("name", "message"), [("standart", "did you mean 'standard'"), ("absent.yaml", "No such file or directory")]
)
def test_an_unknown_policy_says_what_there_is(name: str, message: str) -> None:
    with pytest.raises(NarrowgateError, match=message):
        load_policy(name)
