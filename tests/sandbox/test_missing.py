"""Where the machine lacks something, strict refuses and names it, and weak says what does not hold and holds the rest."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

STRICT = """
from vipfast.errors import UsageError
from vipfast.sandbox import check
try:
    print(check("strict"))
except UsageError as error:
    print(error)
"""
ATTACKS = """
import json, sys
sys.path.append("tests")
from hostile_programs import CORPUS, Prey, attack
from vipfast.sandbox import Sandbox
prey = Prey()
sandbox = Sandbox("weak", workers=1)
print(json.dumps([sandbox.note] + [[*(row["name"], (out := attack(sandbox, prey, row)[0]).ended, out.stdout)] for row in CORPUS
                                   if row["name"] in NAMES]))
sandbox.close()
prey.close()
"""
STRAY = """
import psutil
from vipfast.sandbox import Limits, Sandbox
sandbox = Sandbox("weak", workers=1)
source = '''
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(600)
    os._exit(0)
time.sleep(0.1)
print("done")
'''
print(sandbox.run(source).ended, len(psutil.Process().children(recursive=True)))
print(sandbox.run(source + "time.sleep(600)", limits=Limits(wall_s=0.5)).ended, len(psutil.Process().children(recursive=True)))
print(sandbox.run("import os\\nfor _ in range(3):\\n    os.mkdir('x')\\n    os.chdir('x')").ended, sandbox.run(
    "import os\\nprint(os.listdir('.'))").stdout)
sandbox.close()
print(len(psutil.Process().children(recursive=True)))
"""


def without(parts: str, code: str) -> str:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "sandbox" / "without.py"), parts, code],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("parts", "named"), [("landlock", "Landlock"), ("seccomp", "seccomp"), ("landlock,seccomp", "Landlock")]
)
def test_strict_refuses_and_names_what_is_missing_and_the_remedy(parts, named):
    text = without(parts, STRICT)
    assert text.startswith("--sandbox strict: this machine lacks") and named in text and "--sandbox weak" in text


def test_weak_says_what_does_not_hold_and_the_attacks_of_the_corpus_are_real():
    names = (
        "reads the answers",
        "reads what is not its own",
        "connects to a listening port",
        "sends a datagram",
        "changes mode, owner and times",
    )
    note, *ends = json.loads(without("landlock,seccomp", ATTACKS.replace("NAMES", repr(names))))
    assert note.startswith("sandbox: weak, without: no network, ") and "no reading outside its folder" in note
    found = {name: (ended, stdout) for name, ended, stdout in ends}
    assert found["reads the answers"] == ("exit", "secret-1729\n") and found["sends a datagram"] == ("exit", "42\n")
    assert "/etc/passwd" in found["reads what is not its own"][1] and "42" in found["changes mode, owner and times"][1]
    assert found["connects to a listening port"] == ("exit", "42\n") and len(ends) == len(names)


def test_weak_still_ends_and_reaps_processes_that_left_the_group_and_empties_the_folder():
    assert without("landlock,seccomp", STRAY).split() == ["exit", "1", "time", "1", "exit", "[]", "0"]


def test_filter_alone_still_keeps_programs_from_the_network_and_other_processes():
    code = "from vipfast.sandbox import check\nprint(check('weak'))"
    assert (
        without("landlock", code)
        == "sandbox: weak, without: no reading outside its folder, no writing outside its folder (tried)\n"
    )
