"""The gate on two ranks over Gloo: processes without torchrun's agent, so that what ends them is our own doing."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from junitparser import JUnitXml
from narrowgate.gates.report import Report, load_report, report_schema
from narrowgate.recipes import load_recipe, resolve
from narrowgate.recipes.topology import example_topology
from narrowgate.recipes.wire_plan import Layout, predict_wire
from narrowgate.recipes.wire_units import Sharding
from torch import nn

jsonschema = pytest.importorskip("jsonschema")
pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this PyTorch has no torch.distributed")

#: Seconds that a rank may wait for another, and that a whole run may take.
LIMIT, WHOLE = 20.0, 120.0

#: A user's task that knows nothing of ranks.
TASK = '''
import os
import time

import torch
from narrowgate.gates import Prediction
from torch import nn


class Ranker(nn.Module):
    def __init__(self):
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 33), nn.ReLU())
        self.head = nn.Linear(33, 1)

    def forward(self, x):
        return self.head(self.tower(x))


def rows(seed, count):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 16, generator=g)
    return x, (torch.rand(count, generator=g) < torch.sigmoid(2 * x[:, 0] - 1)).float()


class Task:
    task_names = ("click",)

    def __init__(self, fault=None):
        self.fault, self.calls = fault, 0

    def base_rates(self):
        return [0.35]

    def build_model(self):
        return Ranker()

    def train_batches(self, seed):
        x, y = rows(100 + seed, 64 * 81)
        return [(x[64 * i : 64 * i + 64], y[64 * i : 64 * i + 64]) for i in range(81)]

    def eval_batches(self):
        x, y = rows(7, 500)
        return [(x[i : i + 100], y[i : i + 100], torch.arange(i, i + 100) // 4) for i in range(0, 500, 100)]

    def loss(self, model, batch):
        x, y = batch
        if self.fault is not None:
            self.calls += 1
            self.fault(self.calls)
        return nn.functional.binary_cross_entropy_with_logits(model(x).squeeze(-1).float(), y)

    def predict(self, model, batch):
        x, y, users = batch
        return Prediction(model(x).float(), y.unsqueeze(1), groups=users)

    def optimizer(self, model):
        return torch.optim.Adam(model.parameters(), lr=1e-2)


def good():
    return Task()


def paced():
    return Task(lambda calls: time.sleep(0.02))


def burning():
    def fault(calls):
        if calls == 4 and os.environ["RANK"] == "1":
            raise RuntimeError("matrix on fire")

    return Task(fault)


def ignoring():
    """What some layer on the way might do: it takes the recipe, and gathers as before."""
    import narrowgate.recipes.apply as apply

    apply.gather_low = lambda targets, plan: []
    return Task()
'''
RULE = """
  - layers: "tower.**"
    fprop: {input: fp8_e4m3/row, weight: fp8_e4m3}
    dgrad: {grad: fp8_e5m2/row, weight: fp8_e4m3}
    wgrad: {grad: fp8_e5m2/row, input: fp8_e4m3/row}
"""
RECIPES = {
    "codes": f"recipe: codes\nrules:{RULE}shards: {{all_gather: fp8_e4m3, reduce_scatter: fp8_e5m2/row+sr}}\n",
    "plain": f"recipe: plain\nrules:{RULE}",
    "gather": f"recipe: gather\nrules:{RULE}shards: {{all_gather: fp8_e4m3}}\n",
}


class Forks:
    """The process that ranks are forks of; see ``forks.py``."""

    def __init__(self) -> None:
        script = Path(__file__).with_name("forks.py")
        self.server = subprocess.Popen(
            [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
        )

    def ask(self, **what: Any) -> int:
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        self.server.stdin.write(json.dumps(what) + "\n")
        self.server.stdin.flush()
        return int(self.server.stdout.readline())


@dataclass
class Ranks:
    """The ranks of a gate, two unless said, each a process of its own."""

    room: Path
    forks: Forks
    numbers: list[int] = field(default_factory=list)
    codes: dict[int, int] = field(default_factory=dict)

    def start(self, *arguments: str, limit: float = LIMIT, count: int = 2) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = ["gate", *arguments, "--device", "cpu", "-q", "--collective-timeout", str(limit)]
        for rank in range(count):
            place = {"RANK": str(rank), "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            out, err = (str(self.room / f"{stream}{rank}") for stream in ("out", "err"))
            self.numbers.append(self.forks.ask(cwd=str(self.room), env=place, arguments=command, out=out, err=err))

    def end(self, *ranks: int) -> list[tuple[int, str, str]]:
        """(exit code, standard output, standard error) of some ranks, of all without any."""
        found = []
        for rank in ranks or range(len(self.numbers)):
            if rank not in self.codes:
                self.codes[rank] = self.forks.ask(wait=self.numbers[rank])
            out, err = ((self.room / f"{stream}{rank}").read_text() for stream in ("out", "err"))
            found.append((self.codes[rank], out, err))
        return found

    def wait_for(self, pattern: str, count: int) -> None:
        """Wait until ``count`` files of the store match."""
        until = time.monotonic() + WHOLE
        while len(list((self.room / "reports" / ".seeds").glob(pattern))) < count:
            assert time.monotonic() < until, (self.room / "err0").read_text()
            time.sleep(0.02)

    def signal(self, rank: int, number: int) -> float:
        """Send a signal to a rank; return when."""
        os.kill(self.numbers[rank], number)
        return time.monotonic()

    def kill(self) -> None:
        for rank, number in enumerate(self.numbers):
            if rank not in self.codes:
                os.kill(number, signal.SIGKILL)
                self.end(rank)


def environment() -> dict[str, str]:
    # The host's name may resolve to nowhere; the loopback is there.
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    return {"GLOO_SOCKET_IFNAME": loopback, **os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    """What ranks are forked from."""
    made = Forks()
    yield made
    made.server.communicate("")


@pytest.fixture
def start(tmp_path: Path, forks: Forks) -> Iterator[Callable[..., Ranks]]:
    """Start a gate on two ranks in a folder with the task and the recipes."""
    started: list[Ranks] = []

    def go(*arguments: str, limit: float = LIMIT) -> Ranks:
        started.append(Ranks(furnished(tmp_path), forks))
        started[-1].start(*arguments, limit=limit)
        return started[-1]

    yield go
    for ranks in started:
        ranks.kill()


def furnished(room: Path) -> Path:
    (room / "ranked.py").write_text(TASK)
    for name, text in RECIPES.items():
        (room / f"{name}.yaml").write_text(text)
    return room


def spoken(err: str) -> list[str]:
    """What the program itself said."""
    return [line for line in err.splitlines() if line.startswith("narrowgate")]


@pytest.fixture(scope="module")
def gated(tmp_path_factory: pytest.TempPathFactory, forks: Forks) -> Iterator[tuple[Path, list[tuple[int, str, str]]]]:
    """A whole gate of two recipes: codes on the wire, and the same products with BF16 payload."""
    ranks = Ranks(furnished(tmp_path_factory.mktemp("gate")), forks)
    ranks.start("codes.yaml", "plain.yaml", "--task", "ranked:good", "--seeds", "2", "--steps", "30")
    try:
        yield ranks.room, ranks.end()
    finally:
        ranks.kill()


def test_a_gate_on_two_ranks_ends_alike_and_speaks_once(gated) -> None:
    room, ((code, out, _), (other, silent, err)) = gated
    assert (code, other) == (3, 3)
    assert out.count("INCONCLUSIVE: codes") == out.count("INCONCLUSIVE: plain") == 1
    assert (silent, err) == ("", "")
    for name in ("codes", "plain"):
        assert {path.name for path in (room / "reports" / name).iterdir()} == {
            "report.json", "report.md", "report.html", "junit.xml"
        }  # fmt: skip


@pytest.fixture
def reports(gated) -> dict[str, Report]:
    return {name: load_report(gated[0] / "reports" / name / "report.json") for name in ("codes", "plain")}


def planned(
    room: Path, name: str, monkeypatch: pytest.MonkeyPatch, replicas: int = 1
) -> tuple[dict[str, int], dict[str, int]]:
    """The bytes by collective of BF16 and of the recipe, from shapes alone."""
    monkeypatch.syspath_prepend(str(room))
    model = __import__("ranked").Ranker()
    sharding = Sharding(units=("tower.0", "tower.2"), joint_amaxes=True)
    plan = resolve(load_recipe(room / f"{name}.yaml"), model)
    wire = predict_wire(model, plan, Layout(2 * replicas, 2), example_topology(), sharding)
    names = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
    plain, recipe = ({n: p.given(n) for n in names if p.given(n)} for p in (wire.plain, wire.recipe))
    return plain, recipe


@pytest.mark.parametrize("name", ["codes", "plain"])
def test_the_report_has_the_bytes_that_were_planned(gated, reports, name, monkeypatch) -> None:
    results = reports[name].evidence.distributed.results
    counted = {
        arm: {collective: sum(found.values()) for collective, found in results[arm]["bytes"].items()}
        for arm in ("baseline", "candidate")
    }
    bf16, recipe = planned(gated[0], name, monkeypatch)
    assert counted == {"baseline": bf16, "candidate": recipe}
    assert (recipe == bf16) == (name == "plain")
    assert set(results["baseline"]["bytes"]["all_gather"]) == {"bfloat16"}
    assert ("uint8" in results["candidate"]["bytes"]["all_gather"]) == (name == "codes")
    assert results["payload_ratio"]["all_gather"] == recipe["all_gather"] / bf16["all_gather"]


def test_a_gate_of_replicas_counts_what_travels_within_and_between_them(tmp_path, forks, reports, monkeypatch) -> None:
    """Two replicas of two shards; the plan beside them is of the same layout, from shapes alone."""
    ranks = Ranks(furnished(tmp_path), forks)
    arguments = ("gather.yaml", "--task", "ranked:good", "--seeds", "2", "--steps", "8", "--replicas", "2")
    try:
        ranks.start(*arguments, count=4)
        ended = ranks.end()
    finally:
        ranks.kill()
    assert [code for code, _, _ in ended] == [3] * 4, ended[0][2]
    report = load_report(tmp_path / "reports" / "report.json")
    run, results = report.measurements.distributed, report.evidence.distributed.results
    assert (run.ranks, run.replicas, results["replicas"]) == (4, 2, 2)
    bf16, recipe = planned(tmp_path, "gather", monkeypatch, replicas=2)
    assert (run.baseline.wire.counted_bytes(), run.candidate.wire.counted_bytes()) == (bf16, recipe)
    assert bf16["all_reduce"] == bf16["reduce_scatter"] // 2
    assert recipe["all_gather"] < bf16["all_gather"]
    assert not [reason for reason in report.reasons if reason.code == "wire_ignored"]
    # Nothing stands in for an all-reduce.
    assert results["candidate"]["local_ms"] is results["baseline"]["exposed_ms"] is None
    assert "2 replicas of 2 shards" in (tmp_path / "reports" / "report.md").read_text()
    # The norm of the mean gradient of 4 batches in one process, which BF16 on the way moves a little.
    monkeypatch.syspath_prepend(str(tmp_path))
    task = __import__("ranked").good()
    torch.manual_seed(0)
    model = task.build_model()
    optimizer, batches, norms = task.optimizer(model), task.train_batches(0), []
    for step in range(8):
        optimizer.zero_grad()
        for batch in batches[4 * step : 4 * step + 4]:
            (task.loss(model, batch) / 4).backward()
        norms.append(float(nn.utils.get_total_norm(p.grad for p in model.parameters() if p.grad is not None)))
        optimizer.step()
    assert report.measurements.seeds[0].baseline.stability.max_gradient_norm == pytest.approx(max(norms), rel=0.02)


def test_times_on_a_cpu_are_there_and_judge_nothing(reports) -> None:
    report = reports["plain"]
    level = report.evidence.distributed
    assert level.status == "measured"
    assert level.results["times"].startswith("emulated over Gloo on a CPU, not judged")
    for arm in ("baseline", "candidate"):
        found = level.results[arm]
        assert found["exposed_ms"] == found["step_ms"] - found["local_ms"]
        assert found["scaling_ratio"] == found["alone_ms"] / found["step_ms"]
    # Nothing stands in for a reduction that the recipe does itself.
    assert reports["codes"].evidence.distributed.results["candidate"]["local_ms"] is None
    gates = {gate.name: gate for gate in report.gates}
    assert gates["step_time"].status == "undecided"
    assert gates["step_time"].measured is None
    assert report.environment["ranks"] == 2


def test_reports_of_ranks_show_the_wire_and_fit_the_schema(gated, reports) -> None:
    for name in ("codes", "plain"):
        folder = gated[0] / "reports" / name
        jsonschema.validate(json.loads((folder / "report.json").read_text()), report_schema())
        assert "| distributed | measured | the same step in BF16" in (folder / "report.md").read_text()
        assert "2 ranks over gloo" in (folder / "report.html").read_text()
    text = (gated[0] / "reports" / "codes" / "report.md").read_text()
    assert "| candidate | fp8_e4m3/tensor | fp8_e5m2/row+sr |" in text
    assert "FSDP2 on 2 ranks with BF16 payload" in text


def test_ranks_train_on_the_batches_of_one_step_and_predict_all_rows(gated, reports, monkeypatch) -> None:
    """Against one process that takes two batches a step, with weights and gradients rounded to BF16."""
    monkeypatch.syspath_prepend(str(gated[0]))
    task = __import__("ranked").good()
    torch.manual_seed(0)
    master = task.build_model()
    optimizer = task.optimizer(master)
    batches, losses = task.train_batches(0), []
    for step in range(30):
        both: list[list[Any]] = []
        total = 0.0
        for batch in batches[2 * step : 2 * step + 2]:
            worker = __import__("copy").deepcopy(master).to(torch.bfloat16)
            with torch.autocast("cpu", torch.bfloat16):
                loss = task.loss(worker, batch)
            loss.backward()
            both.append([p.grad for p in worker.parameters()])
            total += float(loss.detach()) / 2
        losses.append(total)
        for parameter, *gradients in zip(master.parameters(), *both, strict=True):
            parameter.grad = torch.stack(gradients).mean(0).float()
        optimizer.step()
    run = reports["plain"].measurements.seeds[0].baseline
    found = [loss for _, loss in run.losses.curve]
    assert found[0] == pytest.approx(losses[0], rel=1e-6)
    assert found == pytest.approx(losses, rel=2e-3)
    rows = reports["plain"].measurements.rows
    assert (rows.rows, rows.clusters) == (500, 125)  # five batches, dealt to two ranks
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        bits = [nn.functional.binary_cross_entropy_with_logits(master(x).float().squeeze(-1), y, reduction="sum")
                for x, y, _ in task.eval_batches()]  # fmt: skip
    assert run.quality["click"].log_loss == pytest.approx(float(sum(bits)) / 500, rel=5e-3)


def test_a_rank_that_is_killed_ends_the_other_and_what_was_finished_is_reused(start) -> None:
    gate = ("gather.yaml", "--task", "ranked:paced", "--seeds", "2", "--steps", "40")
    ranks = start(*gate)
    ranks.wait_for("baseline-*.npz", 2)
    time.sleep(0.2)  # into the candidate's steps
    killed = ranks.signal(1, signal.SIGKILL)
    ((code, out, err),) = ranks.end(0)
    assert time.monotonic() - killed < LIMIT / 2
    assert code == 4
    assert out == ""
    (line,) = spoken(err)
    assert line.startswith("narrowgate: the run failed: rank 1 died")
    room = ranks.room / "reports"
    assert JUnitXml.fromfile(str(room / "junit.xml")).errors == 1
    assert not (room / "report.json").exists()
    kept = {path.name: path.stat().st_mtime_ns for path in (room / ".seeds").glob("*.npz")}
    assert len(kept) >= 2

    (code, _, err), (other, _, _) = start(*gate).end()
    assert (code, other) == (3, 3), err
    report = load_report(room / "report.json")
    assert report.reuse.baseline == 2
    assert report.reuse.baseline + report.reuse.candidate == len(kept)
    for path in (room / ".seeds").glob("baseline-*.npz"):
        assert path.stat().st_mtime_ns == kept[path.name]


def test_rank_0_is_missed_by_the_others_too(start) -> None:
    ranks = start("gather.yaml", "--task", "ranked:paced", "--seeds", "2", "--steps", "40")
    ranks.wait_for("baseline-*.npz", 1)
    ranks.signal(0, signal.SIGKILL)
    ((code, _, err),) = ranks.end(1)
    assert code == 4
    (line,) = spoken(err)
    assert line.startswith("narrowgate: the run failed: rank 0 died")


def test_an_interrupt_ends_all_ranks_with_one_line(start) -> None:
    ranks = start("gather.yaml", "--task", "ranked:paced", "--seeds", "2", "--steps", "40")
    ranks.wait_for("baseline-*.npz", 1)
    for rank in (0, 1):
        ranks.signal(rank, signal.SIGINT)
    (code, _, err), (other, _, silent) = ranks.end()
    assert (code, other) == (130, 130)
    assert spoken(err) == ["narrowgate: interrupted; no report was written of unfinished gates"]
    assert silent == ""


def test_an_error_in_one_rank_is_told_once_with_its_number(start) -> None:
    (code, _, err), (other, _, silent) = start(
        "gather.yaml", "--task", "ranked:burning", "--seeds", "1", "--steps", "6"
    ).end()
    assert (code, other) == (4, 4)
    assert spoken(err) == ["narrowgate: the run failed: rank 1: RuntimeError: matrix on fire"]
    assert silent == ""


def test_a_rank_that_hangs_holds_the_others_for_the_time_limit_only(start) -> None:
    ranks = start("gather.yaml", "--task", "ranked:paced", "--seeds", "2", "--steps", "40", limit=6)
    ranks.wait_for("baseline-*.npz", 1)
    stopped = ranks.signal(1, signal.SIGSTOP)
    ((code, _, err),) = ranks.end(0)
    assert 4 < time.monotonic() - stopped < 20
    assert code == 4
    (line,) = spoken(err)
    assert "6 s, the time limit" in line


def test_a_setting_that_something_ignored_is_named_and_nothing_is_concluded(start) -> None:
    ranks = start("gather.yaml", "--task", "ranked:ignoring", "--seeds", "1", "--steps", "4")
    (code, out, _), _ = ranks.end()
    assert code == 3
    report = load_report(ranks.room / "reports" / "report.json")
    (reason,) = (reason for reason in report.reasons if reason.code == "wire_ignored")
    assert "The recipe asks for shards.all_gather fp8_e4m3/tensor, and the wire does not show it" in reason.text
    assert "as much as BF16" in reason.text
    assert reason.text in out


def test_torchrun_starts_the_same(tmp_path: Path) -> None:
    gate = ["gather.yaml", "--task", "ranked:good", "--seeds", "1", "--steps", "4", "--device", "cpu", "-q"]
    ran = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m",
         "narrowgate.gates", "gate", *gate],
        cwd=furnished(tmp_path), env=environment(), capture_output=True, text=True, timeout=WHOLE, check=False,
    )  # fmt: skip
    assert ran.stdout.count("INCONCLUSIVE: gather") == 1
    assert load_report(tmp_path / "reports" / "report.json").measurements.distributed.ranks == 2
