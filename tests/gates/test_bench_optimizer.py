"""The optimizer benchmark at tiny sizes: what is counted, what is compared, and what makes a result no result."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from narrowgate.gates.bench import optimizer as benchmark
from narrowgate.gates.bench import optimizer_arms
from narrowgate.gates.bench.optimizer import measure_optimizer, model_shapes, optimizer_cases, optimizer_faults
from narrowgate.gates.bench.optimizer_arms import (
    Arm,
    CastArm,
    CodesArm,
    LoweredArm,
    PlainTablesArm,
    Problem,
    TablesArm,
    TorchaoArm,
    adam_arms,
    has_codes,
    same_bits,
)
from narrowgate.precision.cast_operators import kernels_on_cpu
from narrowgate.precision.optimizer_state import lower_state, state_bytes

from ..precision.test_adam_kernel import reference

CPU = torch.device("cpu")
SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_optimizer"
ON_CPU = ("--quick", "--device", "cpu", "--quiet")
N, K = 32, 128


def silent(line: str) -> None:
    pass


def problem(*shapes: tuple[int, ...]) -> Problem:
    return Problem([torch.randn(shape) for shape in shapes], [torch.randn(shape) for shape in shapes])


def stepped(arm: Arm, steps: int = 3) -> Arm:
    for _ in range(steps):
        arm.step()
    return arm


def checked(arms: list[Arm], of: Problem, say: Any = silent) -> dict[str, dict[str, Any]]:
    return benchmark._check(arms, of, "a case", say)


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter PyTorch's fused step is its GPU kernel's formula: on CPUs it rounds otherwise."""
    if kernels_on_cpu():
        monkeypatch.setattr(torch, "_fused_adam_", reference(False))


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are compared as where kernels run; without any, both sides take the long way."""
    monkeypatch.setattr(benchmark, "kernels_on_cpu", lambda: True)


def test_steps_are_rows_of_a_document_that_claim_nothing_on_a_cpu(narrowgate):
    code, text, _ = narrowgate("bench", "optimizer", *ON_CPU, "--case", "48x80", "--case", "*tables", "--json")
    assert code == 0
    found = json.loads(text)
    assert found["name"] == "optimizer"
    assert found["command"].startswith("narrowgate bench optimizer --case")
    rows = found["rows"]
    assert [(row["case"], row["arm"], row["variant"]) for row in rows] == [
        ("48x80", "pytorch", "Adam, fp32"),
        ("48x80", "narrowgate", "bf16"),
        ("48x80", "narrowgate", "bf16, codes"),
        ("48x80", "narrowgate", "bf16 + cast"),
        ("gem-tiny tables", "plain", "rowwise Adagrad"),
        ("gem-tiny tables", "narrowgate", "rowwise Adagrad, one launch"),
    ]
    for row in rows:
        assert row["ms"] > 0
        assert row["host_ms"] > 0
        assert row["emulated"] == (row["arm"] == "narrowgate")
        if not kernels_on_cpu():
            assert row["correct"] is row["codes_written"] is row["one_pass"] is None
        assert row["speedup"] is row["tb_per_s"] is row["copy_share"] is row["memory_tb_per_s"] is None


def test_bytes_are_what_a_step_of_each_parameter_reads_and_writes():
    of, n = problem((N, K), (K,)), N * K + K
    assert Arm(of).bytes() == 28 * n
    assert LoweredArm(of).bytes() == 20 * n
    # A vector has no codes.
    assert CodesArm(of).bytes() == 20 * n + 2 * N * K
    assert CastArm(of).bytes() == 20 * n + (4 + 2) * N * K


@pytest.mark.parametrize("make", [Arm, LoweredArm])
def test_moments_are_as_large_as_the_bytes_of_their_steps_say(make):
    of = problem((N, K))
    arm = stepped(make(of), 1)
    numbers = 4  # the count of steps
    # Read and written; parameter, gradient, and the parameter again.
    assert 2 * (state_bytes(arm.optimizer) - numbers) + 12 * N * K == arm.bytes()


def test_torchaos_moments_are_too():
    pytest.importorskip("torchao.optim")
    arm = TorchaoArm(problem((64, 256)), "AdamWFp8")
    parameter = arm.parameters[0]
    buffers = [arm.optimizer._new_buffer(parameter, signed) for signed in (True, False)]  # type: ignore[attr-defined]
    stored = sum(x.codes.numel() + 4 * x.scale.numel() for x in buffers)
    assert 2 * stored + 12 * 64 * 256 == arm.bytes()


def test_a_launch_over_tables_moves_their_gradients_and_the_rows_that_have_one():
    of = problem((40, 8), (10, 8))
    of.touched = [torch.arange(40) < 5, torch.arange(10) < 10]
    assert PlainTablesArm(of).bytes() == 16 * 50 * 8
    # Weights and accumulators of 15 rows, read and written.
    assert TablesArm(of).bytes() == 4 * 50 * 8 + 15 * (8 * 8 + 8)


def test_dense_parameters_and_tables_are_all_of_a_model():
    dense, tables = (model_shapes("gem-base", tables=tables) for tables in (False, True))
    assert 1.29e9 < sum(torch.Size(shape).numel() for shape in dense) < 1.31e9
    assert (16384, 8192) in dense
    assert (200_001, 512) in tables
    assert not set(tables) & set(dense)


def test_weights_are_matrices_of_whole_tiles_of_the_matrix_units():
    assert has_codes((32, 512))
    assert not any(map(has_codes, [(512,), (8, 512), (64, 88), (2, 16, 16)]))


def test_cases_are_the_weights_of_the_model_and_peers_step_the_large_ones():
    cases = {case.name: case for case in optimizer_cases()}
    assert list(cases) == ["16384x8192", "8192x8192", "32768x512", "512x45056", "gem-base dense", "gem-base tables"]
    assert [name for name, case in cases.items() if case.peers] == ["16384x8192", "8192x8192"]
    assert [case.name for case in optimizer_cases(quick=True)] == ["8192x8192", "gem-base tables"]


def test_the_same_bits_are_told_from_the_same_values():
    zeros, nans = torch.zeros(3), torch.full((3,), torch.nan)
    assert same_bits([zeros, nans], [zeros.clone(), nans.clone()]) == 0
    assert same_bits([zeros, zeros.bfloat16()], [-zeros, torch.tensor([0.0, 1.0, 0.0]).bfloat16()]) == 4
    codes = torch.ones(4).to(torch.float8_e4m3fn)
    assert same_bits([codes], [torch.tensor([1.0, 1.0, 1.125, 1.0]).to(torch.float8_e4m3fn)]) == 1


def test_every_arm_takes_the_same_steps_and_updates_as_pytorch_does(judged):
    of = problem((N, K), (K,))
    arms = list(adam_arms(of, peers=False, say=silent))
    facts = checked(arms, of)
    assert [arm.steps for arm in arms] == [3] * 4
    assert facts["pytorch Adam, fp32"] == {"update_error": None, "bits_differ": None, "correct": None}
    for name in ("narrowgate bf16", "narrowgate bf16, codes", "narrowgate bf16 + cast"):
        assert facts[name]["bits_differ"] == 0
        # BF16 moments do make a difference.
        assert 1e-5 < facts[name]["update_error"] < benchmark.UPDATE_TOLERANCE
        assert facts[name]["correct"] is True


def test_other_bits_and_other_updates_are_not_correct(judged, monkeypatch):
    of = problem((N, K))
    arms = list(adam_arms(of, peers=False, say=silent))
    _, nearest, fast, _ = arms
    nearest.optimizer = lower_state(Arm.make(nearest), "bf16")
    fast.optimizer.param_groups[0]["lr"] *= 1.1
    facts = checked(arms, of)
    assert facts[nearest.name]["correct"] is False
    assert facts[nearest.name]["bits_differ"] > N * K / 4
    assert facts[nearest.name]["update_error"] < benchmark.UPDATE_TOLERANCE
    assert facts[fast.name]["correct"] is False
    assert facts[fast.name]["update_error"] == pytest.approx(0.1, rel=0.05)


def test_a_table_whose_other_rows_change_is_not_correct(judged, monkeypatch):
    case = next(case for case in optimizer_cases(gpu=False, quick=True) if case.tables)
    for planted in (False, True):
        of = benchmark._problem(case, CPU)
        arms = list(optimizer_arms.table_arms(of))
        if planted:
            row = int((~of.touched[0]).nonzero()[0])
            arms[1].parameters[0].data[row, 2] += 1e-7
        facts = checked(arms, of)[arms[1].name]
        assert facts["update_error"] < benchmark.TABLE_TOLERANCE
        assert facts["bits_differ"] == int(planted)
        assert facts["correct"] is not planted


def test_a_row_that_is_wrong_not_fused_or_too_fast_is_a_fault():
    row = {"case": "8x8", "arm": "narrowgate", "variant": "bf16, codes", "correct": True, "update_error": 0.001,
           "bits_differ": 0, "one_pass": True, "weights": 2, "codes_written": 2, "tb_per_s": 4.3,
           "memory_tb_per_s": 4.9}  # fmt: skip
    unknown = dict.fromkeys(("correct", "one_pass", "codes_written", "tb_per_s", "memory_tb_per_s"))
    assert optimizer_faults([row, {**row, **unknown}]) == []
    for changes, message in (
        ({"correct": False, "bits_differ": 7}, "7 elements are not the bits expected; the update is off by 0.001"),
        ({"correct": False, "update_error": None}, "the update is not finite"),
        ({"codes_written": 1}, "the codes of 1 of 2 weights were written"),
        ({"one_pass": False}, "the long way"),
        ({"tb_per_s": 4.95}, "cache"),
    ):
        (fault,) = optimizer_faults([row, {**row, **changes}])
        assert fault.startswith("8x8, narrowgate bf16, codes: ")
        assert message in fault


@pytest.mark.skipif(kernels_on_cpu(), reason="needs a step without kernels")
def test_faults_fail_the_command(narrowgate, judged):
    code, text, errors = narrowgate("bench", "optimizer", *ON_CPU, "--case", "32x128")
    assert code == 4
    assert errors.count("the long way") == 3
    assert "32x128, narrowgate bf16, codes: the codes of 0 of 1 weights were written" in errors
    assert text.count("emulated") == 3


def test_a_peer_that_is_missing_or_fails_is_left_out_and_says_why(monkeypatch):
    lines: list[str] = []
    of = problem((N, K))

    def missing(name: str) -> Any:
        raise ImportError(f"no {name} here")

    with monkeypatch.context() as patch:
        patch.setattr(optimizer_arms.importlib, "import_module", missing)
        arms = list(adam_arms(of, peers=True, say=lines.append))
    assert [arm.arm for arm in arms] == ["pytorch", *["narrowgate"] * 3]
    assert lines == [f"skipped: torchao {name}: no torchao.optim here" for name in ("AdamW8bit", "AdamWFp8")]

    class Failing(TorchaoArm):
        def make(self) -> Any:
            return Arm.make(self)

        def step(self) -> None:
            raise RuntimeError("not on this one\nand more")

    lines.clear()
    arms.insert(2, Failing(of, "AdamW8bit"))
    facts = checked(arms, of, lines.append)
    assert lines == ["skipped: torchao AdamW8bit, a case: not on this one"]
    assert "torchao AdamW8bit" not in facts
    assert [arm.steps for arm in arms] == [3] * 4


def test_the_script_writes_after_each_case_and_keeps_rows_of_others(tmp_path, monkeypatch, capsys):
    main, out = runpy.run_path(str(SCRIPT), run_name="imported")["main"], tmp_path / "optimizer.json"
    for case in ("48x80", "32x128"):
        monkeypatch.setattr(sys, "argv", ["bench_optimizer", *ON_CPU[:3], "--case", case, "--add", "--out", str(out)])
        assert main() == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row["case"] for row in rows] == ["48x80"] * 4 + ["32x128"] * 4
    assert [row["command"].split()[5] for row in rows] == [row["case"] for row in rows]


@pytest.mark.parametrize(("arguments", "message"), [
    ((), "needs a GPU"),
    (("--device", "cpu"), "expected --quick"),
    ((*ON_CPU[:3], "--case", "no-such"), "no case matches no-such"),
    ((*ON_CPU[:3], "--rounds", "0"), "found 0, expected at least 1"),
])  # fmt: skip
def test_the_script_says_what_it_cannot_do(monkeypatch, arguments, message):
    main = runpy.run_path(str(SCRIPT), run_name="imported")["main"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["bench_optimizer", *arguments])
    with pytest.raises(SystemExit, match=message):
        main()


@pytest.mark.skipif(not kernels_on_cpu(), reason="needs Triton's interpreter")
def test_kernels_are_right_in_the_interpreter():
    rows = measure_optimizer(device=CPU, rounds=1, say=silent, quick=True, wanted=lambda name: name == "48x80")
    assert optimizer_faults(rows) == []
    assert [row["correct"] for row in rows] == [None, True, True, True]
    assert [row["one_pass"] for row in rows] == [None, True, True, True]
    assert [row["codes_written"] for row in rows] == [None, None, 1, None]


@pytest.mark.skipif(not kernels_on_cpu(), reason="needs Triton's interpreter")
def test_codes_of_the_pass_that_are_not_the_casts_are_not_correct(monkeypatch):
    right = CastArm.codes

    def wrong(self: CastArm) -> list[torch.Tensor]:
        codes, *rest = right(self)
        codes = codes.clone()
        codes.view(torch.uint8)[3, 5] ^= 1
        return [codes, *rest]

    monkeypatch.setattr(CastArm, "codes", wrong)
    of = problem((N, K))
    facts = checked(list(adam_arms(of, peers=False, say=silent)), of)
    assert facts["narrowgate bf16, codes"]["bits_differ"] == 1
    assert [fact["correct"] for fact in facts.values()] == [None, True, False, True]


@pytest.mark.gpu
def test_steps_on_a_gpu_are_right_and_slower_than_the_memory():
    device = torch.device("cuda", torch.cuda.current_device())
    rows = measure_optimizer(device=device, rounds=3, say=silent, quick=True)
    assert optimizer_faults(rows) == []
    own = [row for row in rows if row["arm"] == "narrowgate"]
    assert len(own) == 4
    assert all(row["correct"] is True for row in own)
    assert [row["codes_written"] for row in own] == [None, 1, None, None]
    assert all(row["tb_per_s"] > 0 for row in rows)
    assert all(0.5 < row["copy_tb_per_s"] / row["memory_tb_per_s"] < 1 for row in rows)
