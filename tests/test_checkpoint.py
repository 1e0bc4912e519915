"""A checkpoint is complete or absent, the newest good one is found, and everything in it comes back bit for bit."""

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from vipfast import atomic, checkpoint
from vipfast.errors import CheckpointError, UsageError

ROOT = Path(__file__).parents[1]


def tiny(seed: int, tied: bool = True, dtype: torch.dtype = torch.float32) -> Qwen2ForCausalLM:
    sizes = dict(vocab_size=37, hidden_size=16, intermediate_size=24, num_hidden_layers=1, max_position_embeddings=64)
    torch.manual_seed(seed)
    heads = dict(num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=tied)
    return Qwen2ForCausalLM(Qwen2Config(**sizes, **heads)).to(dtype)


def folders(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_weights_are_bit_exact(tmp_path, tied, dtype):
    model, other = tiny(0, tied, dtype), tiny(1, tied, dtype)
    path = checkpoint.save(tmp_path, 3, model, None, {"a": 1}, keep=1)
    checkpoint.load_weights(path, other)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name
    assert (other.lm_head.weight is other.model.embed_tokens.weight) == tied
    reloaded = Qwen2ForCausalLM.from_pretrained(path / "model")
    assert reloaded.dtype == dtype and torch.equal(reloaded.lm_head.weight, model.lm_head.weight)


def test_weights_of_another_model_are_refused(tmp_path):
    path = checkpoint.save(tmp_path, 1, tiny(0), None, {}, keep=1)
    with pytest.raises(CheckpointError, match="lm_head.weight is not in the checkpoint"):
        checkpoint.load_weights(path, tiny(0, tied=False))
    with pytest.raises(CheckpointError, match="float32 .* there, torch.float64"):
        checkpoint.load_weights(path, tiny(0, dtype=torch.float64))


def test_adapters_are_saved_alone_and_bit_exact(tmp_path):
    from peft import LoraConfig, get_peft_model

    def adapted(seed):
        config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        base = tiny(0)
        torch.manual_seed(seed)
        return get_peft_model(base, config)

    model, other = adapted(1), adapted(2)
    path = checkpoint.save(tmp_path, 1, model, None, {}, keep=1)
    assert (path / "model" / "adapter_model.safetensors").exists() and not (path / "model" / "model.safetensors").exists()
    checkpoint.load_weights(path, other)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name


def test_newest_are_kept_by_number(tmp_path):
    model = tiny(0)
    for step in (8, 9, 10, 11):
        checkpoint.save(tmp_path, step, model, None, {}, keep=2)
    assert folders(tmp_path) == ["step-10", "step-11"]
    assert checkpoint.newest_complete(tmp_path).name == "step-11"


def test_a_damaged_one_does_not_push_out_a_good_one(tmp_path):
    model = tiny(0)
    for step in (1, 2):
        checkpoint.save(tmp_path, step, model, None, {}, keep=2)
    (tmp_path / "checkpoints/step-2/state.pt").unlink()
    checkpoint.save(tmp_path, 3, model, None, {}, keep=2)
    assert folders(tmp_path) == ["step-1", "step-3"]


DAMAGES = {
    "state.json is missing": lambda path: (path / "state.json").unlink(),
    "state.pt has 3 bytes": lambda path: (path / "state.pt").write_bytes(b"abc"),
    "no COMPLETE marker": lambda path: (path / "COMPLETE").unlink(),
    "COMPLETE cannot be read": lambda path: (path / "COMPLETE").write_text('{"files": {'),
    "model.safetensors has changed": lambda path: flip(path / "model" / "model.safetensors"),
}


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", DAMAGES, ids=str)
def test_damaged_newest_is_passed_over_and_said(tmp_path, damage):
    model = tiny(0)
    for step in (9, 10):
        checkpoint.save(tmp_path, step, model, None, {"step": step}, keep=2)
    DAMAGES[damage](tmp_path / "checkpoints/step-10")
    with pytest.warns(UserWarning, match=f"step-10.*{damage}.*using step-9"):
        path = checkpoint.newest_complete(tmp_path)
    assert path.name == "step-9" and checkpoint.load(path)["step"] == 9
    with pytest.raises(CheckpointError, match=damage):
        checkpoint.load(tmp_path / "checkpoints/step-10")


def test_resume_without_anything_usable_says_why(tmp_path):
    with pytest.raises(CheckpointError, match="no such folder"):
        checkpoint.find(tmp_path)
    (tmp_path / "checkpoints" / "step-5").mkdir(parents=True)
    with pytest.warns(UserWarning, match="no other is left"), pytest.raises(CheckpointError, match="step-5: no COMPLETE"):
        checkpoint.find(tmp_path)


def save_and_die_at(run: Path, boundary: int, save) -> bool:
    """Fork; the child saves and is SIGKILLed before its ``boundary``-th write, fsync, rename or removal. Whether it died so."""
    child = os.fork()
    if child == 0:
        seen = 0

        def count(*_):
            nonlocal seen
            seen += 1
            if seen > boundary:
                os.kill(os.getpid(), signal.SIGKILL)

        def audit(event, args):
            writes = event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR) and str(run) in str(args[0])
            if writes or event in ("os.rename", "os.mkdir", "os.remove", "os.rmdir"):
                count()

        fsync = os.fsync
        os.fsync = lambda descriptor: (count(), fsync(descriptor))
        sys.addaudithook(audit)
        save()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def test_killed_at_every_file_operation_of_a_save(tmp_path):
    old, new = tiny(0), tiny(1)
    run, boundary, died_before, died_after = tmp_path / "run", 0, 0, 0
    checkpoint.save(run, 9, old, None, {"name": "old"}, keep=1)
    while save_and_die_at(run, boundary, lambda: checkpoint.save(run, 10, new, None, {"name": "new"}, keep=1)):
        path = checkpoint.newest_complete(run)
        state, model = checkpoint.load(path), tiny(2)
        checkpoint.load_weights(path, model)
        wanted = new if path.name == "step-10" else old
        assert state["name"] == ("new" if wanted is new else "old")
        assert torch.equal(model.lm_head.weight, wanted.lm_head.weight)
        assert all(name.startswith("step-") for name in folders(run)), "leftovers of the dead writer"
        died_before, died_after = died_before + (wanted is old), died_after + (wanted is new)
        if wanted is new:
            atomic.remove_folder(path)
            checkpoint.save(run, 9, old, None, {"name": "old"}, keep=1)
        boundary += 1
    assert died_before > 15 and died_after > 8
    assert folders(run) == ["step-10"]


def test_killed_while_a_folder_is_replaced(tmp_path):
    best, boundary, seen = tmp_path / "best", 0, set()

    def write(text):
        with atomic.new_folder(best) as folder:
            for name in ("a", "b"):
                (folder / name).write_text(text)

    write("old")
    while save_and_die_at(tmp_path, boundary, lambda: write("new")):
        checkpoint.trim_run(tmp_path, 0)
        assert [path.name for path in tmp_path.iterdir()] == ["best"]
        texts = {path.read_text() for path in best.iterdir()}
        assert len(texts) == 1 and len(list(best.iterdir())) == 2
        seen |= texts
        write("old")
        boundary += 1
    assert seen == {"old", "new"} and boundary > 10


def test_export_replaces_and_keeps_the_old_one_on_a_full_disk(tmp_path, monkeypatch):
    model = tiny(1)
    checkpoint.export(tiny(0), None, tmp_path / "best")
    checkpoint.export(model, None, tmp_path / "best")
    reloaded = Qwen2ForCausalLM.from_pretrained(tmp_path / "best")
    assert torch.equal(reloaded.lm_head.weight, model.lm_head.weight)
    monkeypatch.setattr(
        model, "save_pretrained", lambda *_, **__: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left"))
    )
    with pytest.raises(CheckpointError, match="disk is full, so best was not saved"):
        checkpoint.export(model, None, tmp_path / "best")
    assert [path.name for path in tmp_path.iterdir()] == ["best"] and (tmp_path / "best" / "model.safetensors").exists()


def test_everything_is_on_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    done, sync, replace = [], atomic.sync, os.replace
    monkeypatch.setattr(atomic, "sync", lambda path: (done.append(path.name), sync(path)))
    monkeypatch.setattr(os, "replace", lambda a, b: (done.append("-> " + Path(b).name), replace(a, b)))
    path = checkpoint.save(tmp_path, 1, tiny(0), None, {}, keep=1)
    named = done.index("-> step-1")
    wanted = {file.name for file in path.rglob("*")} | {"metrics.jsonl"}
    assert {"model", "model.safetensors", "state.pt", "state.json", "COMPLETE"} <= wanted <= set(done[:named])
    assert done[named - 1].startswith(".step-1.tmp-") and done[named + 1 :] == ["checkpoints"], "folders are synced too"


def test_a_living_writer_is_left_alone(tmp_path):
    other = tmp_path / f".step-1.tmp-{os.getppid()}"
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    gone = tmp_path / f".step-2.tmp-{dead.pid}"
    other.mkdir(), gone.mkdir()
    atomic.settle(tmp_path)
    assert other.exists() and not gone.exists()


@pytest.mark.parametrize("where", ["weights", "tensors", "marker"])
def test_full_disk_keeps_the_previous_checkpoint(tmp_path, monkeypatch, where):
    from safetensors import SafetensorError

    model = tiny(0)
    before = checkpoint.save(tmp_path, 1, model, None, {}, keep=1)

    def full(*_, **__):
        if where == "weights":
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        if where == "tensors":
            raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 8640 vs 8592")
        raise OSError(errno.ENOSPC, "No space left on device")

    target = {"weights": (model, "save_pretrained"), "tensors": (torch, "save"), "marker": (os, "fsync")}[where]
    monkeypatch.setattr(*target, full)
    with pytest.raises(CheckpointError, match=f"--output-dir .*step-2 was not saved.*{before} is intact"):
        checkpoint.save(tmp_path, 2, model, None, {}, keep=1)
    assert folders(tmp_path) == ["step-1"] and checkpoint.newest_complete(tmp_path) == before


def test_other_errors_are_not_called_a_full_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error")))
    with pytest.raises(OSError, match="Input/output"):
        checkpoint.save(tmp_path, 2, tiny(0), None, {}, keep=1)
    assert folders(tmp_path) == []


def test_disk_is_checked_at_start(tmp_path):
    checkpoint.check_disk(tmp_path / "not" / "yet", 1)
    with pytest.raises(UsageError, match="--output-dir .*GB free"):
        checkpoint.check_disk(tmp_path / "not" / "yet", 2**62)


def test_trim_cuts_records_back(tmp_path):
    model = tiny(0)
    for step in (2, 4):
        checkpoint.save(tmp_path, step, model, None, {}, keep=2)
    lines = [json.dumps({"step": step, "reward/mean": 0.5}) + "\n" for step in range(6)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines) + '{"step": 1, "rew')
    (tmp_path / "rollouts").mkdir()
    for name in ("2.parquet", "3.parquet", "10.parquet", "notes.txt"):
        (tmp_path / "rollouts" / name).write_text("x")
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / "tensorboard" / "events").write_text("x")
    checkpoint.trim_run(tmp_path, 2)
    assert (tmp_path / "metrics.jsonl").read_text() == "".join(lines[:3])
    assert sorted(path.name for path in (tmp_path / "rollouts").iterdir()) == ["2.parquet", "notes.txt"]
    assert folders(tmp_path) == ["step-2"] and (tmp_path / "tensorboard" / "events").exists()


def test_torn_last_line_goes_even_if_its_step_is_kept(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}')
    checkpoint.trim_run(tmp_path, 5)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n'


def test_module_imports_without_torch():
    code = "import sys; from vipfast import checkpoint; checkpoint.newest_complete('x'); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
