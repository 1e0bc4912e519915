"""The garbage collector is kept out of the imports, once in a process, and is back whatever happens."""

import subprocess
import sys

import pytest


def _run(code: str) -> str:
    """What a process of its own prints; a frozen collector is a matter of the whole process."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_what_is_made_meanwhile_is_passed_over_and_the_collector_is_back():
    code = """
import gc
from vipfast import collection
with collection.held():
    print(gc.isenabled(), gc.get_freeze_count())
first = gc.get_freeze_count()
print(gc.isenabled(), first > 0)
with collection.held():  # a second run in the same process
    print(gc.isenabled())
print(gc.isenabled(), gc.get_freeze_count() == first)
"""
    assert _run(code).split("\n") == ["False 0", "True True", "True", "True True", ""]


def test_an_error_brings_the_collector_back_and_one_switched_off_stays_off():
    code = """
import gc
from vipfast import collection
gc.disable()
with collection.held():
    pass
print(gc.isenabled())
gc.enable()
try:
    with collection.held():
        raise KeyboardInterrupt
except KeyboardInterrupt:
    print(gc.isenabled())
"""
    assert _run(code).split() == ["False", "True"]


@pytest.mark.parametrize("command", [["train", "--steps", "1", "--eval-every", "0"], ["train", "--dry-run"]])
def test_a_command_ends_without_a_word_about_leaks(tmp_path, command):
    ended = subprocess.run(
        [sys.executable, "-m", "vipfast", *command, "--output-dir", str(tmp_path / "run"), "--device", "cpu"],
        capture_output=True,
        text=True,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
