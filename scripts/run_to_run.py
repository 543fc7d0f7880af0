"""How far apart runs of the same thing lie, beyond what each says of itself: what `speed.run_to_run` of a policy is.

    python scripts/run_to_run.py 'gem-small=reports/a/report.json,reports/b/report.json' 'gem-base=a.json,b.json'

Each argument is a thing and the files of its runs: gate reports, of which the lowered modules' speedup counts, or
results of scripts/bench_gem, of which the last row of gem-fp8 does. Both are times of the device; a step that waits for
its host varies with what else the host does, and says nothing here. Measures nothing; writes
benchmarks/run_to_run.json.

Of each thing the variance of its runs' log speedups, less the mean of the variances that the runs state; over all
things by degrees of freedom.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import Any

from narrowgate.gates.module_sums import total_log_ratios
from narrowgate.gates.report import load_report
from narrowgate.gates.statistics import paired
from narrowgate.precision.errors import NarrowgateError
from scipy import special

OUT = Path(__file__).resolve().parent.parent / "benchmarks" / "run_to_run.json"
_VERSIONS = ("python", "torch", "cuda", "driver", "triton", "narrowgate")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("things", nargs="+", metavar="NAME=FILE,FILE")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    facts: list[tuple[str, str, dict[str, Any]]] = []
    squares, freedom = 0.0, 0
    for thing in options.things:
        name, _, files = thing.partition("=")
        found = [_run(Path(file)) for file in files.split(",")]
        logs, errors = [run[0] for run in found], [run[1] for run in found]
        if len(found) < 2:
            raise SystemExit(f"{name}: found one run, expected two or more")
        between = max(0.0, statistics.variance(logs) - statistics.fmean(error**2 for error in errors))
        squares, freedom = squares + between * (len(found) - 1), freedom + len(found) - 1
        facts += [run[2] for run in found]
        rows += [
            {"case": name, "run": number, "speedup": math.exp(log), "error": error, "sd": math.sqrt(between)}
            for number, (log, error) in enumerate(zip(logs, errors, strict=True), 1)
        ]
    machines = {machine for _, machine, _ in facts}
    if len(machines) != 1:
        raise SystemExit(f"found runs of {sorted(machines)}, expected one machine")
    result = {
        "name": "run_to_run",
        "date": max(date for date, _, _ in facts)[:10],
        "command": "python scripts/run_to_run.py " + " ".join(f"{n.partition('=')[0]}=..." for n in options.things),
        "machine": machines.pop(),
        "versions": facts[0][2],
        "sd": math.sqrt(squares / freedom),
        "df": freedom,
        "rows": rows,
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"sd {result['sd']:.4f} with {freedom} degrees of freedom; written: {options.out}")


def _run(path: Path) -> tuple[float, float, tuple[str, str, dict[str, Any]]]:
    """A run's log speedup with its standard error, and its date, machine and versions."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SystemExit(f"{path}: cannot read it as JSON: {error}") from None
    if isinstance(data, dict) and "rows" in data:
        row = next((row for row in reversed(data["rows"]) if row["variant"] == "gem-fp8" and row.get("ci")), None)
        if row is None:
            raise SystemExit(f"{path}: found no row of gem-fp8 with a ratio, expected a result of scripts/bench_gem")
        # One-sided 95 % bounds over rounds.
        width = math.log(row["ci"][1] / row["ci"][0]) / 2
        error = width / -special.stdtrit(row["rounds"] - 1, 0.05)
        return math.log(row["ratio"]), error, (data["date"], data["machine"], data["versions"])
    try:
        report = load_report(path)
    except NarrowgateError as error:
        raise SystemExit(str(error)) from None
    modules = report.measurements.module_time
    if modules is None or min((len(module.quartets) for module in modules.modules), default=0) < 2:
        raise SystemExit(f"{path}: found no times of modules, expected the report of a gate on a GPU")
    estimate = paired(total_log_ratios(modules.modules))
    environment = report.environment
    versions = {name: environment[name] for name in _VERSIONS}
    return estimate.mean, estimate.error, (environment["date"], environment["gpu"], versions)


if __name__ == "__main__":
    main()
