"""An evaluation from settled options to tables: load, sample what is missing, score, show."""

import json
from contextlib import ExitStack
from pathlib import Path

from vipfast import atomic
from vipfast.distributed import Ranks
from vipfast.evaluation.folder import open_folder
from vipfast.evaluation.options import GO_ON, Evaluation
from vipfast.evaluation.pool import check_keys, choose
from vipfast.evaluation.report import show, took
from vipfast.evaluation.results import results
from vipfast.evaluation.samples import Samples
from vipfast.evaluation.sampling import make_chunks, open_ranks, sample_missing
from vipfast.policy import load_tokenizer

DONE, STOPPED = 0, 3


def run(asked: Evaluation, ranks: Ranks) -> int:
    """Evaluate; every rank calls this alike, rank 0 alone writes and shows.

    Returns:
        0, or 3 when stopped by SIGTERM or Ctrl-C with the chunk it was in written down.
    """
    config = asked.config
    placement = open_ranks(config, ranks)
    tokenizer = load_tokenizer(config)
    with ExitStack() as stack:
        pools = []
        for task in asked.configs:
            pools.append(choose(asked, task, tokenizer))
            stack.callback(getattr(pools[-1].task.reward, "close", lambda: None))
        check_keys(asked, pools)
        chunks = make_chunks(asked, pools, placement.num_homes)
        store: Samples | None = None

        def opened() -> tuple[str, int]:
            nonlocal store
            print(*(note for pool in pools for note in pool.notes), sep="\n", flush=True)
            folder = open_folder(asked, pools)
            wanted = [[(pool.name, prompt.uid) for prompt in prompts] for pool, prompts in chunks]
            store = Samples(folder / "samples.jsonl", wanted, asked.samples)
            stack.callback(store.close)
            return str(folder), store.num_chunks

        folder, num_done = ranks.decided(opened)
        stopped, progress = sample_missing(asked, chunks, num_done, store, tokenizer, placement)
        if ranks.rank:
            return STOPPED if stopped else DONE
        if stopped:
            print(f"stopped by {stopped} after {progress.done} of {progress.total} samples; {GO_ON}")
            return STOPPED
        found = results(asked, pools, store.rows)
        text = json.dumps(found, indent=1, allow_nan=False, ensure_ascii=False) + "\n"
        atomic.write_file(Path(folder) / "results.json", text.encode("utf-8", "replace"))
        show(found, took(progress.new, progress.total, progress.seconds), folder)
    return DONE
