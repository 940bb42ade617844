import os
import signal
import subprocess
import sys

import pytest

from headwater.controller import interrupt
from headwater.controller.interrupt import StopRequest, process_age_s


def test_age_counts_from_the_start_of_the_process_and_not_from_an_import():
    code = (
        "import time\n"
        "open('/proc/self/comm', 'w').write('a) R 1 (b')\n"  # a name that looks like the fields behind it
        "time.sleep(2)\n"
        "from headwater.controller.interrupt import process_age_s\n"
        "print(process_age_s())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 2 <= float(done.stdout) < 600
    assert process_age_s() > 0


def test_time_is_up_only_after_a_step_of_this_process(monkeypatch: pytest.MonkeyPatch):
    age = 10.0
    monkeypatch.setattr(interrupt, "process_age_s", lambda: age)
    stop = StopRequest(must_save_by_s=10)
    assert not stop.requested
    stop.step_ended()
    assert stop.requested
    assert stop.exit_code == 0
    age = 9.99
    assert not stop.requested


def test_without_a_time_a_step_ends_nothing():
    stop = StopRequest()
    stop.step_ended()
    assert not stop.requested


def test_a_first_signal_after_the_time_does_not_end_the_process_at_once():
    with StopRequest(must_save_by_s=0.001) as stop:
        stop.step_ended()
        assert stop.requested
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.signum == signal.SIGTERM
        assert stop.exit_code == 143
