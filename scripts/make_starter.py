"""Rebuild the starter model and the arithmetic pool, or measure the shipped ones afresh: ``python scripts/make_starter.py``."""

import argparse
from pathlib import Path

import torch

from vipfast.starter.build import build, remeasure
from vipfast.tasks.arithmetic import ASSETS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="names every random number of the build")
    parser.add_argument("--steps", type=int, default=1000, help="steps of supervised fine-tuning")
    parser.add_argument("--threads", type=int, default=2, help="torch threads; no more than there are idle cores")
    parser.add_argument("--assets", type=Path, default=ASSETS, help="folder that holds starter/ and arithmetic/")
    parser.add_argument("--measure-only", action="store_true", help="sample the pool afresh, print the report, write nothing")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.measure_only:
        remeasure(args.assets, args.seed)
    else:
        build(args.assets, args.seed, args.steps)


if __name__ == "__main__":
    main()
