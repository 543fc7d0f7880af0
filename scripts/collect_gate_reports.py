"""Sum up benchmarks/reports/*/report.json as benchmarks/gate_MODEL.json, a file a model: one row an arm of a run.

    python scripts/collect_gate_reports.py

Measures nothing: benchmarks/reports/README.md has the commands that made the reports. A file's date is that of its
latest run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parent.parent / "benchmarks"
_VERSIONS = ("narrowgate", "python", "torch", "cuda", "driver", "triton")


def main() -> None:
    by_model: dict[str, dict[str, dict[str, Any]]] = {}
    for path in sorted((_ROOT / "reports").glob("*/report.json")):
        report = json.loads(path.read_text(encoding="utf-8"))
        by_model.setdefault(report["model"]["name"], {})[path.parent.name] = report
    for model, reports in by_model.items():
        machines = {report["environment"]["gpu"] for report in reports.values()}
        if len(machines) != 1:
            raise SystemExit(f"{model}: expected reports of one machine, found {sorted(map(str, machines))}")
        name = f"gate_{model.replace('-', '_')}"
        result = {
            "name": name,
            "date": max(report["environment"]["date"] for report in reports.values())[:10],
            "command": "python scripts/collect_gate_reports.py (the runs: benchmarks/reports/README.md)",
            "machine": machines.pop(),
            "versions": {name: next(iter(reports.values()))["environment"][name] for name in _VERSIONS},
            "rows": [row for folder, report in reports.items() for row in _rows(folder, report)],
        }
        (_ROOT / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def _rows(folder: str, report: dict[str, Any]) -> list[dict[str, Any]]:
    step = report["evidence"]["step"]["results"]["device_events"]
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
    run = {"report": folder, "case": f"{report['model']['name']} on {report['data']['name']}"}
    return [
        {**run, "arm": "bf16", "variant": "bf16", "ms": step["baseline_ms"]},
        {**run, "arm": "narrowgate", "variant": recipe, "ms": step["candidate_ms"], **decided},
    ]


if __name__ == "__main__":
    main()
