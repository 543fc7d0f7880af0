"""The benchmarks at tiny sizes: what is counted, what makes a result no result, and what the command says."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from narrowgate.gates.bench import casts as cast_benchmark
from narrowgate.gates.bench import suite, timing
from narrowgate.gates.bench.agreement import agreement
from narrowgate.gates.bench.cast_cases import PRODUCERS, Cast, cast_cases
from narrowgate.gates.bench.casts import cast_faults, measure_casts
from narrowgate.gates.bench.gemms import gemm_rows, with_shares
from narrowgate.gates.bench.timing import compiled_already, in_turns
from narrowgate.precision.errors import NarrowgateError
from narrowgate.precision.fusion import fuse_casts
from narrowgate.precision.kernels.program import Program
from narrowgate.precision.kernels.reference import values
from narrowgate.recipes.rates import load_rates
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

CPU = torch.device("cpu")
SCRIPTS = Path(__file__).parents[2] / "scripts"
ON_CPU = ("--quick", "--device", "cpu", "--quiet")
M, N = 160, 256


def silent(line: str) -> None:
    pass


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_casts_are_rows_of_a_document_that_claim_nothing_on_a_cpu(narrowgate):
    code, text, _ = narrowgate("bench", "casts", *ON_CPU, "--case", "cast*", "--json")
    assert code == 0
    found = json.loads(text)
    assert found["name"] == "casts"
    assert found["command"] == "narrowgate bench casts --case 'cast*' --quick --device cpu"
    assert {"date", "machine", "versions"} <= found.keys()
    rows = found["rows"]
    assert len(rows) == 2 * 6 * 2
    for row in rows:
        assert row["ms"] > 0
        assert row["host_us"] > 0
        assert row["emulated"]
        # A reference that agrees with itself, and a CPU's bandwidth, are no evidence.
        assert row["correct"] is row["copy_share"] is row["tb_per_s"] is None


@pytest.mark.parametrize(("scale", "dtype", "expected"), [
    # Read once or twice, written as codes for both contractions, and scales.
    ("delayed", "bf16", M * N * (2 + 2) + 4),
    ("tensor", "bf16", M * N * (2 * 2 + 2) + 4),
    ("clipped", "bf16", M * N * (2 * 2 + 2) + 4),
    ("row", "fp32", M * N * (2 * 4 + 2) + 4 * (M + N)),
    ("1x128", "bf16", M * N * (2 + 2) + 4 * (M * 2 + 2 * N)),
    ("128x128", "fp32", M * N * (4 + 2) + 4 * 2 * 2),
])  # fmt: skip
def test_a_casts_bytes_are_passes_times_what_it_reads_and_what_it_writes(scale, dtype, expected):
    (case,) = (
        c
        for c in cast_cases(shape=(M, N))
        if (c.producer.name, c.scale, c.dtype, c.stochastic) == ("cast", scale, dtype, False)
    )
    leaves = case.producer.make((M, N), torch.bfloat16 if dtype == "bf16" else torch.float32, CPU)
    assert case.bytes(leaves, Cast(case, leaves).launch(leaves)) == expected


def test_a_gates_gradient_reads_three_matrices_and_writes_two_side_by_side():
    (case,) = (
        c for c in cast_cases(shape=(M, N), full=False) if c.name.startswith("d_swiglu") and c.scale == "delayed"
    )
    leaves = case.producer.make((M, N), torch.bfloat16, CPU)
    assert case.bytes(leaves, Cast(case, leaves).launch(leaves)) == M * N * (3 * 2 + 2 * 2) + 4


def _program(function, *inputs) -> str:
    module = make_fx(function, decomposition_table=select_decomp_table(), tracing_mode="fake")(*inputs)
    fuse_casts(module.graph)
    (cast,) = (n for n in module.graph.nodes if n.target is torch.ops.narrowgate.cast_fp8.default)
    return cast.args[1]


def _cast(x):
    return torch.ops.narrowgate.cast_fp8([x], "mn|0", "fp8_e4m3", "=", None, None, None, None, None, None)


def test_measured_programs_are_those_that_compiled_graphs_get():
    programs = {producer.name: producer.program for producer in PRODUCERS}
    h, grad, weight = torch.randn(M, 2 * N), torch.randn(M, N), torch.randn(N)
    h, grad, weight = h.bfloat16(), grad.bfloat16(), weight.bfloat16()

    def swiglu(h):
        gate, up = h.chunk(2, -1)
        return _cast(F.silu(gate) * up)

    def gradient(gate, up, grad):
        return _cast(torch.cat([torch.ops.aten.silu_backward(grad * up, gate), grad * F.silu(gate)], -1))

    gate, up = h.chunk(2, -1)
    square = grad.float().square().mean(-1, keepdim=True)
    traced = {
        "swiglu": (_program(swiglu, h), [gate, up]),
        "d_swiglu": (_program(gradient, gate, up, grad), [grad, up, gate]),
        "rms_norm": (_program(lambda x, w: _cast(F.rms_norm(x, (N,), w, 1e-6)), grad, weight), [grad, square, weight]),
    }
    for name, (text, leaves) in traced.items():
        # PyTorch's versions spell a sigmoid differently; what is read, written and computed must be the same.
        found, measured = Program.parse(text), Program.parse(programs[name])
        assert (found.leaves, found.pieces) == (measured.leaves, measured.pieces)
        torch.testing.assert_close(values(leaves, found), values(leaves, measured))


def _codes(*values: float) -> torch.Tensor:
    return torch.tensor(values).to(torch.float8_e4m3fn)


def test_agreement_tells_equal_from_near_from_wrong():
    codes, scale = torch.randn(100, 100).to(torch.float8_e4m3fn), torch.rand(100) + 1
    same = agreement((codes, scale), (codes.clone(), scale.clone()))
    assert same.exact
    assert same.close

    stepped = codes.clone()
    stepped.view(torch.uint8)[0, 0] ^= 1
    one = agreement((stepped, scale * (1 + 1e-6)), (codes, scale))
    assert not one.exact
    assert one.close
    assert one.steps == 1

    flipped = codes.clone()
    flipped.view(torch.uint8)[0, 0] ^= 0x10
    assert not agreement((flipped,), (codes,)).close
    assert not agreement((codes, scale * 1.001), (codes, scale)).close
    assert not agreement((codes, scale * torch.nan), (codes, scale)).close
    assert not agreement((torch.zeros_like(scale).to(torch.float8_e4m3fn),), (scale.to(torch.float8_e4m3fn),)).close


def test_the_two_zeros_are_no_step_apart_but_not_the_same_bits():
    found = agreement((_codes(*[0.0] * 2000),), (_codes(-0.0, *[0.0] * 1999),))
    assert not found.exact
    assert found.steps == 0


def test_a_row_that_beats_the_memory_or_differs_from_the_reference_is_a_fault():
    row = {"case": "cast", "arm": "narrowgate", "variant": "tensor", "correct": True, "tb_per_s": 4.3,
           "memory_tb_per_s": 4.9, "codes_differ": 0.0, "scale_error": 0.0}  # fmt: skip
    assert cast_faults([row, {**row, "correct": None, "tb_per_s": None, "memory_tb_per_s": None}]) == []
    (fault,) = cast_faults([row, {**row, "tb_per_s": 4.95}])
    assert "cache" in fault
    (fault,) = cast_faults([{**row, "correct": False, "codes_differ": 0.5, "scale_error": None}])
    assert "not the reference's" in fault


def test_wrong_codes_fail_the_command(narrowgate, monkeypatch):
    right = Cast.expected

    def wrong(self, leaves):
        codes, *rest = right(self, leaves)
        codes = codes.clone()
        codes.view(torch.uint8)[3, 5] ^= 1
        return codes, *rest

    monkeypatch.setattr(cast_benchmark, "kernels_on_cpu", lambda: True)
    monkeypatch.setattr(Cast, "expected", wrong)
    code, text, errors = narrowgate("bench", "casts", *ON_CPU, "--case", "cast*bf16")
    assert code == 4
    assert "NO" in text
    assert errors.count("not the reference's") == 12


def test_every_benchmark_runs_on_a_cpu_and_says_what_is_emulated(narrowgate, tmp_path):
    out = tmp_path / "all.json"
    code, text, _ = narrowgate("bench", "gemms", "mlp", *ON_CPU, "--out", str(out))
    assert code == 0
    gemms, mlp = json.loads(out.read_text())
    assert [found["name"] for found in (gemms, mlp)] == ["gemms", "mlp_blocks"]
    for row in (*gemms["rows"], *mlp["rows"]):
        assert row["emulated"] == (row["arm"] not in ("bf16", "bf16_fused"))
        assert row["ms"] > 0
    assert all(row["ceiling_share"] is None for row in gemms["rows"])
    assert {row["variant"] for row in mlp["rows"]} == {"bf16", "delayed", "current", "row", "block"}
    assert all(row["speedup"] is row["floor_ms"] is None for row in mlp["rows"] if row["emulated"])
    assert all(0.01 < row["relative_error"]["y"] < 0.3 for row in mlp["rows"] if row["emulated"])
    assert text.count("emulated") == sum(row["emulated"] for row in (*gemms["rows"], *mlp["rows"]))


@pytest.mark.parametrize(("arguments", "message"), [
    ((), "needs a GPU"),
    (("--device", "cpu"), "needs a GPU"),
    (("--quick",), "needs a GPU"),
    (("--device", "cuda"), "no CUDA device"),
    (("cast", *ON_CPU), "did you mean 'casts'"),
    (("gemms", *ON_CPU, "--case", "no-such"), "bench gemms: no case matches no-such"),
    (("gemms", *ON_CPU, "--out", "."), "--out .: expected the path of a file"),
    (("gemms", *ON_CPU, "--out", "a-file/x.json"), "a-file: cannot write"),
    ((*ON_CPU, "--rounds", "0"), "--rounds"),
])  # fmt: skip
def test_what_cannot_be_measured_is_one_line_and_exit_2(narrowgate, no_gpu, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a-file").touch()
    code, text, errors = narrowgate("bench", *arguments)
    assert code == 2
    assert text == ""
    assert message in errors
    assert len(errors.splitlines()) == 1


def test_products_are_rates_that_prices_take_and_the_best_of_a_width_is_their_ceiling(tmp_path):
    rows = gemm_rows(CPU, silent, [(32, 64, 48)], emulated=True)
    bandwidths = [
        {"case": variant, "arm": "bf16", "variant": variant, "ms": 1.0, "tb_per_s": 4.0} for variant in ("copy", "cast")
    ]
    head = {"name": "gemm_rates", "date": "2026-01-01", "command": "x", "machine": "x", "versions": {}}
    file = tmp_path / "rates.json"
    file.write_text(json.dumps({**head, "rows": rows + bandwidths}))
    assert len(load_rates(file).gemms) == 7

    rates = [("bf16", 600.0), ("bf16", 750.0), ("fp8_tensor/fast", 1200.0), ("fp8_row/fast", 900.0)]
    shared = with_shares([{"variant": variant, "tflops": rate} for variant, rate in rates], claim=True)
    assert [row["ceiling_share"] for row in shared] == [0.8, 1.0, 1.0, 0.75]


def test_arms_take_turns_in_an_order_that_turns_round():
    calls = []
    times = in_turns({name: lambda name=name: calls.append(name) for name in "abc"}, 4, 1, CPU)
    assert {name: len(found) for name, found in times.items()} == dict.fromkeys("abc", 4)
    assert "".join(calls) == "abc" + "cba" + "bca" + "acb"


@pytest.mark.parametrize("name", ["bench_casts", "bench_gemm_rates", "bench_mlp"])
def test_scripts_find_what_they_wrap(name):
    assert callable(runpy.run_path(str(SCRIPTS / name), run_name="imported")["main"])


@pytest.mark.gpu
def test_casts_on_a_gpu_are_the_references_and_slower_than_the_memory():
    device = torch.device("cuda", torch.cuda.current_device())
    rows = measure_casts(
        device=device, rounds=3, say=silent, quick=True, peers=False, wanted=lambda case: case.startswith("swiglu")
    )
    assert cast_faults(rows) == []
    own = [row for row in rows if row["arm"] == "narrowgate"]
    assert own
    assert all(row["correct"] is True for row in own)
    assert all(0 < row["tb_per_s"] <= row["memory_tb_per_s"] for row in own)
    assert all(0.5 < row["copy_tb_per_s"] / row["memory_tb_per_s"] < 1 for row in own)


def test_what_is_compiled_again_is_no_measurement():
    compiled = torch.compile(lambda x: x + 1, backend="eager")
    compiled(torch.ones(3))
    with compiled_already():
        compiled(torch.ones(3))
    threads = torch.get_num_threads()

    def changed():
        torch.set_num_threads(threads + 1)
        compiled(torch.ones(3))

    try:
        with pytest.raises(NarrowgateError, match="1 graphs were compiled again after every arm was ready"):
            run_compiled_already(changed)
    finally:
        torch.set_num_threads(threads)


def run_compiled_already(work):
    with compiled_already():
        work()


def test_libraries_of_arms_are_there_before_any_is_made(monkeypatch):
    asked = []

    def import_module(name):
        asked.append(name)
        raise OSError("broken")

    monkeypatch.setattr(timing.importlib, "import_module", import_module)
    timing.load_libraries(["bf16", "torchao", "narrowgate", "transformer_engine", "torchao"])
    assert asked == ["torchao.float8", "transformer_engine.pytorch"]


@pytest.mark.parametrize("tune", [False, True])
def test_tiles_are_measured_only_where_that_is_asked_for(tune, tmp_path, monkeypatch):
    from narrowgate.precision import autotune

    modes = []
    monkeypatch.setattr(suite, "measure_casts", lambda **settings: modes.append(autotune()) or [])
    before = autotune()
    settings = suite.Settings(CPU, lambda line: None, tune=tune)
    with pytest.raises(NarrowgateError, match="no case matches"):
        suite.run_benchmark("casts", settings, "")
    assert modes == ["on" if tune else before]
    assert autotune() == before
