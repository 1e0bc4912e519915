"""A live view that waits to be looked at: python screens.py FOLDER draws a step under way until SIGTERM."""

import sys
import time
from types import SimpleNamespace

import numpy as np

from vipfast.config import Config
from vipfast.stop import StopRequest
from vipfast.telemetry.activity import NOW
from vipfast.telemetry.telemetry import Telemetry

LINE = {
    "budget/rollouts": 512, "reward/mean": 0.25, "reward/std_within": 0.21, "signal/frac_wasted_rollouts": 0.5,
    "time/generate_s": 0.75, "time/update_s": 0.25, "time/step_s": 1.0, "eval/mean@8": 0.4, "eval/pass@8": 0.5,
}  # fmt: skip

if __name__ == "__main__":
    with Telemetry(sys.argv[1], Config(), 60) as telemetry, StopRequest(telemetry.say) as stop:
        row = {"reward": 1.0, "prompt": "sort 3 1 =", "completion": "1 3" + 200 * " 5", "uid": "u", "answer": "1 3"}
        telemetry.log(1, LINE, np.repeat([2, 6, 14, 30], [32, 16, 8, 8]))
        telemetry._view.update({}, None, [row])
        NOW.begin("step 2")
        NOW.enter("generate", 512, "rollouts", SimpleNamespace(left_s=4.0))
        print("said before", flush=True)
        while stop.name != "SIGTERM":
            time.sleep(0.05)
