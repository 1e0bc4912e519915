"""Train every allocator on the same seeds and compare: ``python scripts/compare.py --seeds 0 1 2 -- --steps 60``."""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from vipfast.compare import run, show
from vipfast.errors import UsageError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--allocators", nargs="+", default=["uniform", "vip", "vigor"], choices=["uniform", "vip", "vigor"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--output-dir", default=None, help="keep the runs in this folder")
    parser.add_argument("flags", nargs="*", help="after --, options of scripts/train.py for every run")
    args = parser.parse_args()
    folder = Path(args.output_dir or tempfile.mkdtemp(prefix="vipfast-compare-"))
    try:
        outcomes = [run(allocator, seed, folder, args.flags) for seed in args.seeds for allocator in args.allocators]
    except UsageError as error:
        sys.exit(f"error: {error}")
    print(json.dumps(show(outcomes)))


if __name__ == "__main__":
    main()
