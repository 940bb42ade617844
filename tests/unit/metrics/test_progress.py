import io

import pytest
from rich.console import Console

from headwater.metrics.progress import Progress

METRICS = {
    "train/reward": 0.41,
    "train/loss": -0.0134,
    "train/token_mult_prob_error": 1.01,
    "timing/train/generation": 1.4,
    "timing/train/policy_training": 1.9,
    "timing/train/total_step_time": 3.5,
    "train/lr": 1e-6,
}


class Clock:
    """Seconds that a test sets."""

    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def plain(total_steps, first_step, clock):
    out = io.StringIO()
    return out, Progress(total_steps, first_step, Console(file=out, force_terminal=False, width=40), clock=clock)


def test_a_step_is_one_plain_line_however_narrow_the_console(clock):
    out, progress = plain(70, 1, clock)
    with progress:
        progress.phase("generation")
        progress.step(1, METRICS)
    assert out.getvalue() == (
        "step 1/70  reward 0.41  loss -0.013  mismatch 1.010  gen 1.4s  train 1.9s  3.5 s/step  eta 4m02s\n"
    )


def test_missing_metrics_are_left_out(clock):
    out, progress = plain(2, 1, clock)
    with progress:
        progress.step(0, {"validation/accuracy": 0.296})
        progress.step(2, {})
    assert out.getvalue() == "step 0/2  accuracy 0.30\nstep 2/2\n"


def test_time_lost_to_saves_is_shown_where_there_is_any(clock):
    out, progress = plain(9, 1, clock)
    lost = {"checkpoint/stall_s": 2.31, "checkpoint/busy_wait_s": 2.3, "checkpoint/fence_wait_s": 0.4}
    progress.step(1, lost)
    progress.step(2, dict.fromkeys(lost, 0.01))
    assert "save 2.3s  writer busy 2.3s  fence 0.4s" in out.getvalue().splitlines()[0]
    assert "0.0s" not in out.getvalue().splitlines()[1]


@pytest.mark.parametrize(
    ("loss", "text"),
    [(float("nan"), "nan"), (float("inf"), "inf"), (-4.2e-5, "-4.20e-05"), (0.0, "0.000"), (3e7, "3.00e+07")],
)
def test_a_loss_of_any_size_is_legible(clock, loss, text):
    out, progress = plain(1, 1, clock)
    with progress:
        progress.step(1, {"train/loss": loss})
    assert out.getvalue() == f"step 1/1  loss {text}\n"


def test_time_left_counts_all_that_goes_on_between_steps_but_not_the_set_up(clock):
    out, progress = plain(104, 4, clock)
    with progress:
        clock.now = 1000.0
        progress.step(4, {"timing/train/total_step_time": 2.0})
        clock.now = 1004.0
        progress.step(5, {"timing/train/total_step_time": 2.0})
    # Steps took 2 and 4 seconds, so 3 in the mean: 100 x 2 s, then 99 x 3 s.
    assert [line.rsplit("eta ")[1] for line in out.getvalue().splitlines()] == ["3m20s", "4m57s"]


def test_hours_left_are_shown_as_hours(clock):
    out, progress = plain(1001, 1, clock)
    with progress:
        progress.step(1, {"timing/train/total_step_time": 4.0})
    assert out.getvalue().endswith("eta 1h06m\n")


def test_notes_are_plain_lines_taken_literally(clock):
    out, progress = plain(2, 1, clock)
    with progress:
        progress.note("saved [bold]step_000002[/bold] :rocket: " + "x" * 60)
    assert out.getvalue() == "saved [bold]step_000002[/bold] :rocket: " + "x" * 60 + "\n"


def test_a_log_holds_no_control_codes(clock):
    out, progress = plain(3, 1, clock)
    with progress:
        progress.phase("training")
        progress.note("note")
        progress.step(1, METRICS)
    assert out.getvalue().replace("\n", "").isprintable()


def test_a_terminal_shows_the_step_its_metrics_the_last_accuracy_and_the_phase(clock):
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, color_system=None, width=160, _environ={"TERM": "xterm"})
    with Progress(70, 1, console, clock=clock) as progress:
        progress.step(0, {"validation/accuracy": 0.3})
        progress.phase("genera[tion]")
        progress.note("resumed [x]")
        progress.step(12, METRICS)
    shown = out.getvalue()
    last = shown[shown.rindex("12/70") :]
    assert "reward 0.41  accuracy 0.30  loss -0.013  mismatch 1.010" in last
    assert "3.5 s/step  eta 3m23s" in last
    assert "resumed [x]\n" in shown


def test_the_phase_is_shown_live(clock):
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, color_system=None, width=160, _environ={"TERM": "xterm"})
    with Progress(70, 1, console, clock=clock) as progress:
        progress.phase("genera[tion]")
        progress.note("redraws the bar")
        assert "genera[tion]" in out.getvalue()


def test_the_cursor_comes_back_when_a_run_fails(clock):
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, color_system=None, width=80, _environ={"TERM": "xterm"})
    with pytest.raises(RuntimeError, match="boom"), Progress(70, 1, console, clock=clock):
        raise RuntimeError("boom")
    assert out.getvalue().rindex("\x1b[?25h") > out.getvalue().rindex("\x1b[?25l")
