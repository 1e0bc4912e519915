"""Train a policy: ``python scripts/train.py --allocator vigor``; ``--help`` lists every option."""

import sys

from vipfast.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
