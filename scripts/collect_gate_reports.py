"""Sum up benchmarks/reports/*/report.json as benchmarks/gate_gem_small.json: one row an arm of a run.

    python scripts/collect_gate_reports.py --date YYYY-MM-DD

Measures nothing: benchmarks/reports/README.md has the commands that made the reports.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parent.parent / "benchmarks"
_VERSIONS = ("narrowgate", "python", "torch", "cuda", "driver", "triton")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--date", required=True, help="when the runs were made")
    args = parser.parse_args()
    reports = [json.loads(path.read_text()) for path in sorted((_ROOT / "reports").glob("*/report.json"))]
    machines = {report["environment"]["gpu"] for report in reports}
    if len(machines) != 1:
        raise SystemExit(f"expected reports of one machine, found {sorted(map(str, machines))}")
    result = {
        "name": "gate_gem_small",
        "date": args.date,
        "command": "python scripts/collect_gate_reports.py (the runs: benchmarks/reports/README.md)",
        "machine": machines.pop(),
        "versions": {name: reports[0]["environment"][name] for name in _VERSIONS},
        "rows": [row for report in reports for row in _rows(report)],
    }
    (_ROOT / "gate_gem_small.json").write_text(json.dumps(result, indent=2) + "\n")


def _rows(report: dict[str, Any]) -> list[dict[str, Any]]:
    step = report["evidence"]["step"]["results"]["device_events"]
    case = f"{report['model']['name']} on {report['data']['name']}"
    decided = {
        "verdict": report["verdict"],
        "seeds": report["statistics"]["n"],
        "speedup": [step["ci_low"], step["speedup"], step["ci_high"]],
        "ne_change": {
            gate["task"]: [gate["ci_low"], gate["measured"], gate["ci_high"]]
            for gate in report["gates"]
            if gate["name"] == "ne"
        },
    }
    recipe = report["recipe"]["name"]
    return [
        {"case": case, "arm": "bf16", "variant": "bf16", "ms": step["baseline_ms"]},
        {"case": case, "arm": "narrowgate", "variant": recipe, "ms": step["candidate_ms"], **decided},
    ]


if __name__ == "__main__":
    main()
