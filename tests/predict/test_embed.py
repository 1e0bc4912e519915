"""Embeddings: cached by text in memory, in shipped files and on disk; the model is loaded only for a text in none of them."""

import sqlite3
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

from vipfast.predict import embed
from vipfast.predict.embed import Embedder, text_hash


class FakeModel:
    """Counts what it embeds; a text's vector depends on the text alone."""

    def __init__(self):
        self.encoded = []

    def encode(self, texts):
        self.encoded += texts
        return np.stack([np.random.default_rng(list(text_hash(text))).normal(size=384) for text in texts]).astype(np.float16)


@pytest.fixture
def model(monkeypatch):
    fake = FakeModel()
    monkeypatch.setattr(embed, "_MiniLM", lambda: fake)
    return fake


def test_a_text_is_embedded_once_and_duplicates_share_a_vector(model, tmp_path):
    embedder = Embedder(shipped=[], cache=tmp_path / "c.sqlite")
    first = embedder(["sort 3 1 =", "copy 2 =", "sort 3 1 ="])
    assert first.shape == (3, 384) and first.dtype == np.float16
    assert (first[0] == first[2]).all() and (first[0] != first[1]).any()
    assert model.encoded == ["sort 3 1 =", "copy 2 ="]
    assert (embedder(["copy 2 ="])[0] == first[1]).all() and len(model.encoded) == 2
    assert embedder([]).shape == (0, 384)


def test_the_next_run_reads_the_same_bits_from_disk(model, tmp_path):
    texts = [f"sort {i} =" for i in range(1200)] + ["ünï \ud800 ="]
    first = Embedder(shipped=[], cache=tmp_path / "c.sqlite")(texts)
    again = Embedder(shipped=[], cache=tmp_path / "c.sqlite")(texts)
    assert (again == first).all() and len(model.encoded) == len(texts)


def test_shipped_vectors_need_neither_model_nor_cache(model, tmp_path):
    embed.build_shipped(["a", "b", "a"], tmp_path / "embeddings.npz")
    with np.load(tmp_path / "embeddings.npz") as arrays:
        assert arrays["hashes"].shape == (2, 16) and arrays["hashes"].dtype == np.uint8
        assert arrays["vectors"].shape == (2, 384) and arrays["vectors"].dtype == np.float16
    assert [path.name for path in tmp_path.iterdir()] == ["embeddings.npz"]
    wanted = model.encode(["b", "a"])
    model.encoded.clear()
    assert (Embedder(shipped=[tmp_path / "embeddings.npz"], cache=tmp_path / "none" / "c.sqlite")(["b", "a"]) == wanted).all()
    assert not model.encoded and not (tmp_path / "none").exists()


def truncated(path):
    path.write_bytes(path.read_bytes()[:3000])


def garbage(path):
    path.write_bytes(b"not a database, but long enough to be taken for one " * 100)


def another_schema(path):
    path.unlink()
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE embeddings (something INTEGER)")


@pytest.mark.parametrize("damage", [truncated, garbage, another_schema])
def test_a_damaged_or_foreign_cache_is_rebuilt_with_a_warning(model, tmp_path, damage):
    path = tmp_path / "c.sqlite"
    texts = [f"sort {i} =" for i in range(50)]
    first = Embedder(shipped=[], cache=path)(texts)
    damage(path)
    model.encoded.clear()
    with pytest.warns(UserWarning, match="damaged or not a cache"):
        assert (Embedder(shipped=[], cache=path)(texts) == first).all()
    assert model.encoded == texts
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert (Embedder(shipped=[], cache=path)(texts) == first).all()
    assert model.encoded == texts, "the rebuilt cache holds everything"


def test_a_vector_of_the_wrong_size_is_embedded_again(model, tmp_path):
    path = tmp_path / "c.sqlite"
    first = Embedder(shipped=[], cache=path)(["a", "b"])
    with sqlite3.connect(path) as db:
        db.execute("UPDATE embeddings SET vector = ? WHERE hash = ?", (b"1234", text_hash("a")))
    db.close()
    assert (Embedder(shipped=[], cache=path)(["a", "b"]) == first).all()
    assert model.encoded == ["a", "b", "a"]


def test_a_cache_that_cannot_be_written_is_done_without(model, tmp_path):
    (tmp_path / "file").write_text("in the way")
    embedder = Embedder(shipped=[], cache=tmp_path / "file" / "c.sqlite")
    with pytest.warns(UserWarning, match="cannot be used .* Set XDG_CACHE_HOME"):
        vectors = embedder(["a"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert (embedder(["a", "b"])[0] == vectors[0]).all()


def test_cache_path_follows_xdg(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert embed.cache_path() == Path("/somewhere/vipfast/embeddings/all-MiniLM-L6-v2.sqlite")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert embed.cache_path() == Path.home() / ".cache/vipfast/embeddings/all-MiniLM-L6-v2.sqlite"


def test_making_any_allocator_imports_neither_torch_nor_sentence_transformers():
    code = """
import sys
from vipfast.allocation import make_allocator
from vipfast.config import Config
for name in ("uniform", "vigor", "vip"):
    make_allocator(Config(allocator=name), [("u", "text")])
assert not {"torch", "sentence_transformers"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_the_real_model_tells_families_apart_and_warns_of_long_prompts(tmp_path):
    embedder = Embedder(shipped=[], cache=tmp_path / "c.sqlite")
    sort, other_sort, count = embedder(["sort 8 3 7 1 =", "sort 5 2 9 4 =", "count 3 in 1 3 3 ="]).astype(np.float64)
    assert np.linalg.norm(sort) == pytest.approx(1, abs=1e-3)
    assert sort @ other_sort > sort @ count
    many = embedder(["sort 8 3 7 1 ="] + [f"reverse {i} =" for i in range(31)])[0]
    assert (many == embedder(["sort 8 3 7 1 ="])[0]).all(), "by hash, a text keeps its first vector in any batch"
    words = "word " * 600
    with pytest.warns(UserWarning, match="only the first 256 tokens of a prompt: 2 of 3"):
        a, b, _ = embedder([words + "one", words + "two", "short"])
    assert np.allclose(a, b, atol=1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        embedder([words + "three"])
