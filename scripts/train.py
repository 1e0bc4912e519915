"""Train a policy: ``python scripts/train.py --allocator vigor``; ``--help`` lists every option."""

import sys

from vipfast.cli import main

if __name__ == "__main__":
    sys.exit(main())
