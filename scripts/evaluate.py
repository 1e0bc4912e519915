"""Evaluate a model: ``python scripts/evaluate.py --model starter --task arithmetic``; ``--help`` lists every option."""

import sys

from vipfast.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["evaluate", *sys.argv[1:]]))
