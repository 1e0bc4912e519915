"""What a rank of torchrun does with vLLM: start it in this process, sync, sample.

    torchrun --nproc-per-node 2 vllm_ranks.py FOLDER TENSOR_PARALLEL_SIZE

writes RANK.json with the texts, and the largest difference of their log-probs from the policy's.
"""

import json
import sys
from pathlib import Path

import torch.distributed as dist
from decoding import log_probs, request, run

from vipfast import Config
from vipfast.engine import make_engine
from vipfast.engine.base import Sampling
from vipfast.policy import load_policy
from vipfast.resolve import resolve

PROMPTS = [[1, 2, 3, 4, 5], [7, 7, 1]]


def main(folder: Path, tensor_parallel_size: int) -> None:
    dist.init_process_group("gloo")
    config = resolve(Config(engine="vllm", device="cpu", threads=1, tensor_parallel_size=tensor_parallel_size)).config
    policy = load_policy(config)
    engine = make_engine(config, policy, Sampling(8, stop_ids=(256,)), 257)
    engine.sync(policy.named_parameters())
    # ranks that share a model ask alike; others have prompts of their own
    prompts = PROMPTS if tensor_parallel_size > 1 else PROMPTS[dist.get_rank() :]
    rows = run(engine, [request(i, tokens, count=3) for i, tokens in enumerate(prompts)])
    gap = max(abs(row.logp - log_probs(policy, prompts[slot], row.tokens.tolist())).max() for (slot, _), row in rows.items())
    texts = [row.tokens.tolist() for _, row in sorted(rows.items())]
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps({"texts": texts, "gap": float(gap)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
