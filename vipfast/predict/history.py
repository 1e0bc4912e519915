"""Every prompt's own counts so far, aged: what a policy that keeps moving has left of them."""

from collections.abc import Sequence

import numpy as np

_FIELDS = ("successes", "trials", "shift", "seen")


class History:
    """Counts by prompt_uid, as many prompts as were ever observed.

    Args:
        drift: variance a prompt's logit gains per step of age. Counts whose logit has noise v = 1/(k + 1/2) + 1/(n - k + 1/2)
            are worth v / (v + drift age) of their number by then.
    """

    def __init__(self, drift: float):
        self.drift = drift
        self.uids: list[str] = []
        self._rows: dict[str, int] = {}
        # successes, trials, shared shift when observed, step when observed; float64 [4, capacity]
        self._table = np.zeros((len(_FIELDS), 64))

    def __len__(self) -> int:
        return len(self.uids)

    def rows(self, uids: Sequence[str]) -> np.ndarray:
        """int64 [B], the stored row of each uid; -1 where there is none."""
        return np.array([self._rows.get(uid, -1) for uid in uids], np.int64)

    def aged(self, uids: Sequence[str], step: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """float64 [B]: successes and trials as they count at ``step`` (0 where there are none), and their shared shift."""
        row = self.rows(uids)
        k, n, shift, seen = np.where(row >= 0, self._table[:, row], 0.0)
        noise = 1 / (k + 0.5) + 1 / (n - k + 0.5)
        kept = noise / (noise + self.drift * np.maximum(step - seen, 0.0))
        return k * kept, n * kept, shift

    def add(self, uids: Sequence[str], successes: np.ndarray, trials: np.ndarray, shift: float, step: int) -> None:
        """Add counts [B] of distinct prompts observed at ``step``, when the shared shift stood at ``shift``."""
        old_k, old_n, old_shift = self.aged(uids, step)
        for uid in uids:
            if uid not in self._rows:
                self._rows[uid] = len(self.uids)
                self.uids.append(uid)
        while self._table.shape[1] < len(self.uids):
            self._table = np.concatenate([self._table, np.zeros_like(self._table)], 1)
        total = old_n + trials
        mixed = (old_shift * old_n + shift * trials) / total
        self._table[:, self.rows(uids)] = old_k + successes, total, mixed, np.full(len(uids), float(step))

    def state_dict(self) -> dict:
        """``history_uids`` list [S]; ``history`` float64 [4, S]: successes, trials, shift, seen."""
        return {"history_uids": list(self.uids), "history": self._table[:, : len(self.uids)].copy()}

    def load_state_dict(self, state: dict) -> None:
        self.uids = list(state["history_uids"])
        self._rows = {uid: row for row, uid in enumerate(self.uids)}
        self._table = np.array(state["history"], np.float64)
        if not self._table.shape[1]:
            self._table = np.zeros((len(_FIELDS), 64))
