"""Train every allocator on the same seeds and compare: ``python scripts/compare.py --seeds 0 1 2 -- --steps 60``."""

import sys

from vipfast.compare import main

if __name__ == "__main__":
    sys.exit(main())
