"""The kernels folder must never shadow or overwrite the PyPI package of that name, and imports must stay light."""

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

LOAD_QWEN2 = """
import sys
sys.path.insert(0, "")
from transformers import Qwen2Config, Qwen2ForCausalLM
Qwen2ForCausalLM(Qwen2Config(vocab_size=37, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                             num_attention_heads=2, num_key_value_heads=2))
for name, module in sys.modules.items():
    if name == "kernels" or name.startswith("kernels."):
        # without an __init__.py the folder is at most an empty namespace, which any real package on the path outranks
        file = getattr(module, "__file__", None)
        assert file is None or not file.startswith(sys.argv[1]), (name, file)
        assert name == "kernels" or not name.removeprefix("kernels.").startswith(("policy_", "token_")), name
"""


def run(code: str, *args: str) -> str:
    done = subprocess.run([sys.executable, "-c", code, *args], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_model_class_loads_at_the_repo_root_and_takes_no_kernels_from_here():
    run(LOAD_QWEN2, str(ROOT))


def test_kernels_is_a_plain_folder_behind_a_relative_symlink():
    assert not (ROOT / "kernels" / "__init__.py").exists()
    link = ROOT / "vipfast" / "kernels"
    assert link.is_symlink() and str(link.readlink()) == "../kernels"
    assert not (ROOT / "tests" / "__init__.py").exists() and not (ROOT / "conftest.py").exists()


def test_wheel_holds_vipfast_kernels_and_the_starter_and_no_top_level_kernels(tmp_path):
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", tmp_path, ROOT], check=True
    )
    names = zipfile.ZipFile(next(tmp_path.glob("vipfast-*.whl"))).namelist()
    assert "vipfast/kernels/policy_loss.py" in names and "vipfast/assets/starter/model.safetensors" in names
    tops = {name.split("/")[0] for name in names}
    assert all(top == "vipfast" or top.startswith("vipfast-") for top in tops), tops


def test_every_module_of_the_product_is_in_the_wheel_list():
    from setuptools import find_packages

    packages = set(find_packages(str(ROOT), include=["vipfast", "vipfast.*"])) | {"vipfast.kernels"}
    folders = {path.parent.relative_to(ROOT) for path in (ROOT / "vipfast").rglob("*.py") if "assets" not in path.parts}
    assert {".".join(folder.parts) for folder in folders} <= packages


def test_import_vipfast_loads_no_torch():
    run("import vipfast, sys, vipfast.types, vipfast.errors; assert not {'torch', 'vllm', 'tyro'} & set(sys.modules)")
