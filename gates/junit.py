"""``junit.xml``: one test case a gate, for the CI systems that show those."""

from __future__ import annotations

from junitparser import Error, Failure, JUnitXml, Skipped, TestCase, TestSuite

from ..precision.errors import on_one_line
from .report import Report


def junit_report(report: Report) -> str:
    """Return the report as JUnit XML: a failing gate is a failure, an undecided one is skipped with its reason.

    A baseline that is not sane and an anomaly concern the whole run: they stand as a skipped case ``verdict``, so
    that no reader takes passing gates for an accepted recipe.
    """
    suite = TestSuite(f"narrowgate {report.recipe.name}")
    suite.add_property("verdict", report.verdict)
    suite.add_property("recipe_hash", report.recipe.hash)
    for gate in report.gates:
        place = "/".join(part for part in (gate.task, gate.slice) if part is not None)
        case = _case(report.recipe.name, f"{gate.name}[{_plain(place)}]" if place else gate.name)
        of_gate = (gate.name, gate.task, gate.slice)
        texts = [r.text for r in report.reasons if (r.gate, r.task, r.slice) == of_gate]
        message = _plain(" ".join(texts)) or f"{gate.metric} {gate.status}"
        body = (
            f"{gate.metric}: measured {gate.measured}, bounds [{gate.ci_low}, {gate.ci_high}],"
            f" passes {gate.direction} {gate.threshold}"
        )
        if gate.status == "fail":
            failure = Failure(message, "reject")
            failure.text = body
            case.result = [failure]
        elif gate.status == "undecided":
            skipped = Skipped(message)
            skipped.text = body
            case.result = [skipped]
        case.system_out = body
        suite.add_testcase(case)
    general = [r.text for r in report.reasons if r.gate is None and report.verdict == "inconclusive"]
    if general:
        case = _case(report.recipe.name, "verdict")
        case.result = [Skipped(_plain(" ".join(general)))]
        suite.add_testcase(case)
    return _text(suite)


def junit_failed_run(recipe: str, message: str) -> str:
    """Return JUnit XML for a run that failed before it could decide: one case with an error."""
    suite, case = TestSuite(f"narrowgate {recipe}"), _case(recipe, "run")
    case.result = [Error(_plain(message), "run failed")]
    suite.add_testcase(case)
    return _text(suite)


def _case(recipe: str, name: str) -> TestCase:
    return TestCase(name, classname=f"narrowgate.{recipe}")


def _plain(text: str) -> str:
    # XML has no way to write most control characters (the colours of a compiler's message) nor half characters.
    return on_one_line(text).encode("utf-8", "replace").decode()


def _text(suite: TestSuite) -> str:
    xml = JUnitXml()
    xml.add_testsuite(suite)
    xml.update_statistics()
    return xml.tostring().decode()
