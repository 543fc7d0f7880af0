from __future__ import annotations

import io

import pytest
from narrowgate.gates import progress
from narrowgate.gates.progress import Lines, Live, Progress, Step, make_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def play(shown: Progress) -> None:
    with shown:
        shown.phase("training 2 paired seeds", trainings=2)
        shown.step(Step(seed=0, arm="baseline", step=5, steps=10, loss=0.6931))
        shown.step(Step(seed=1, arm="baseline", step=5, steps=None, loss=0.7))
        shown.trained(0, "baseline")
        shown.trained(1, "baseline")


def test_plain_lines_tell_seed_arm_step_loss_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_LINE_EVERY", 0.0)
    stream = io.StringIO()
    play(Lines(stream))
    lines = stream.getvalue().splitlines()
    assert lines[0] == "training 2 paired seeds"
    assert lines[1].startswith("seed 0 baseline step 5/10 loss 0.69310, ")
    assert "step 5/?" in lines[2]
    assert lines[-1] == "seed 1 baseline done, 2 of 2 trainings, 0:00 left"
    assert "\x1b" not in stream.getvalue()


def test_plain_lines_are_few_where_steps_are_many() -> None:
    stream = io.StringIO()
    shown = Lines(stream)
    shown.phase("training", trainings=1)
    for i in range(10_000):
        shown.step(Step(0, "baseline", i, 10_000, 0.5))
    assert len(stream.getvalue().splitlines()) == 1


def test_a_terminal_gets_a_live_table() -> None:
    from rich.console import Console

    stream = Terminal()
    shown = Live(stream)
    shown.phase("training 2 paired seeds", trainings=2)
    shown.step(Step(seed=0, arm="baseline", step=5, steps=10, loss=0.6931))
    console = Console(file=io.StringIO(), width=80)
    console.print(shown._render())
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for part in ("training 2 paired seeds", "baseline", "5/10", "0.69310", "0/2 trainings", "left"):
        assert part in text
    play(Live(stream))


@pytest.mark.parametrize(
    ("quiet", "terminal", "environment", "kind"),
    [
        (True, True, {}, Progress),
        (False, False, {"TERM": "xterm"}, Lines),
        (False, True, {"TERM": "xterm"}, Live),
        (False, True, {"TERM": "xterm", "NO_COLOR": "1"}, Lines),
        (False, True, {"TERM": "dumb"}, Lines),
    ],
)
def test_the_display_fits_the_stream(monkeypatch: pytest.MonkeyPatch, quiet, terminal, environment, kind) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert type(make_progress(quiet, Terminal() if terminal else io.StringIO())) is kind
