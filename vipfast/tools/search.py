"""Search in a local corpus: BM25 by SQLite's full-text index, which is made once and kept by the corpus's content."""

import hashlib
import os
import re
import sqlite3
import threading
import time
import warnings
from pathlib import Path

from vipfast.errors import UsageError
from vipfast.tools.base import Output
from vipfast.tools.corpus import files, passages

FORMAT = "2"
"""Of the index; another one is made anew."""

MOST_WORDS = 64
"""Words of a query that are looked for."""


def index_folder() -> Path:
    """Where indexes are kept: under XDG_CACHE_HOME, else ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vipfast" / "search"


class Search:
    """Implements ``tools.base.Tool``. The same query gives the same passages in the same order: by BM25, then as in the corpus.

    Args:
        corpus: a file or folder (``tools.corpus``).
        k: passages of a search.
        folder: where the index is kept; ``index_folder()`` unless given.

    Raises:
        DataError: the corpus cannot be read.
        UsageError: this Python's SQLite has no full-text index, or the index cannot be kept.
    """

    name = "search"
    description = "Searches a collection of texts and returns the passages that fit the query best."
    parameters = {"query": "Words to look for"}
    beside = True

    def __init__(self, corpus: str, k: int, folder: Path | None = None):
        self.k = k
        self._path = _index(corpus, folder or index_folder())
        self._own = threading.local()
        self._connections: list[sqlite3.Connection] = []
        self._lock = threading.Lock()
        if repeated := self._connection().execute("SELECT passages FROM repeated").fetchone()[0]:
            warnings.warn(
                f"--search-corpus {corpus}: {repeated} passages have an id that an earlier one has, so an id in gold_ids or "
                "supporting stands for all of its passages",
                stacklevel=2,
            )

    def __call__(self, time_s: float, query: str) -> Output:
        # Words in quotes: nothing that is sampled can be read as an operator.
        words = list(dict.fromkeys(re.findall(r"\w+", query.lower())))[:MOST_WORDS]
        if not words:
            return Output("error: the query has no words", error=True)
        asked = " OR ".join(f'"{word}"' for word in words)
        connection, end = self._connection(), time.monotonic() + time_s
        connection.set_progress_handler(lambda: time.monotonic() > end, 100_000)
        try:
            rows = connection.execute(
                "SELECT id, title, text FROM passages WHERE passages MATCH ? ORDER BY bm25(passages), rowid LIMIT ?",
                (asked, self.k),
            ).fetchall()
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_INTERRUPT:
                raise
            return Output(f"error: the search took more than {time_s:g} s", error=True)
        if not rows:
            return Output("nothing found")
        shown = [f"[{i}] {title}\n{text}" if title else f"[{i}] {text}" for i, (_, title, text) in enumerate(rows, 1)]
        return Output("\n\n".join(shown), found=tuple(id for id, _, _ in rows))

    def _connection(self) -> sqlite3.Connection:
        """One for each thread."""
        if not hasattr(self._own, "connection"):
            uri = f"{self._path.resolve().as_uri()}?mode=ro&immutable=1"
            self._own.connection = sqlite3.connect(uri, uri=True, check_same_thread=False)
            with self._lock:
                self._connections.append(self._own.connection)
        return self._own.connection

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        self._connections.clear()
        self._own = threading.local()


def _index(corpus: str, folder: Path) -> Path:
    """The file with the corpus's index, made if it is not there; processes that make it at once do each other no harm."""
    paths = files(corpus)
    digest = hashlib.blake2b(FORMAT.encode(), digest_size=16)
    for path in paths:
        digest.update(f"\0{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            while block := file.read(2**20):
                digest.update(block)
    index = folder / f"{digest.hexdigest()}.sqlite"
    if index.is_file():
        return index
    making = index.with_suffix(f".{os.getpid()}.making")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        making.unlink(missing_ok=True)
        _fill(making, passages(paths))
        making.replace(index)
    except (OSError, sqlite3.OperationalError) as error:
        raise UsageError(
            f"--search-corpus {corpus}: its index cannot be made in {folder} ({error}); make room there, or set XDG_CACHE_HOME "
            "to another folder; 'no such module: fts5' means that this Python's SQLite lacks full-text search"
        ) from error
    finally:
        if making.exists():
            making.unlink()
    return index


def _fill(path: Path, rows) -> None:
    connection = sqlite3.connect(path)
    try:
        connection.execute("PRAGMA journal_mode = OFF")
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute("CREATE VIRTUAL TABLE passages USING fts5(id UNINDEXED, title, text, tokenize = 'porter unicode61')")
        connection.executemany("INSERT INTO passages VALUES (?, ?, ?)", rows)
        connection.execute("CREATE TABLE repeated AS SELECT count(*) - count(DISTINCT id) AS passages FROM passages")
        connection.commit()
    finally:
        connection.close()
