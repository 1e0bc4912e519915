"""What a real terminal shows: after a resize nothing of the old frame is left, and Ctrl-C is answered above the view."""

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is the terminal")

SCRIPT = Path(__file__).with_name("screens.py")
PATIENCE_S = 60


class Screen:
    def __init__(self, socket: Path, command: str):
        self._tmux = ["tmux", "-S", str(socket), "-f", "/dev/null"]
        self.run("new-session", "-d", "-x", "110", "-y", "35", "-s", "screen", command)

    def run(self, *arguments: str) -> str:
        return subprocess.run([*self._tmux, *arguments], check=True, capture_output=True, text=True).stdout

    def resize(self, width: int, height: int) -> None:
        self.run("resize-window", "-t", "screen", "-x", str(width), "-y", str(height))

    def until(self, wanted) -> list[str]:
        """The lines on the screen as soon as ``wanted(lines)`` holds."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            lines = self.run("capture-pane", "-p", "-t", "screen").rstrip().splitlines()
            if wanted(lines):
                return lines
            assert time.monotonic() < deadline, "\n".join(lines)
            time.sleep(0.1)


@pytest.fixture
def screen(tmp_path):
    shown = Screen(tmp_path / "tmux", f"env -u COLUMNS -u LINES {sys.executable} {SCRIPT} {tmp_path / 'run'}")
    yield shown
    shown.run("kill-server")


def whole(width: int):
    """Whether a frame of this width is there, with nothing of another below or above it."""

    def there(lines: list[str]) -> bool:
        marks = ("vipfast  vigor", "step 1/60", "── learning", "── a rollout", "▸ 1 3")
        once = all(sum(mark in line for line in lines) == 1 for mark in marks)
        return once and any(line.startswith("── a rollout") and len(line) == width for line in lines)

    return there


def test_a_resize_leaves_nothing_of_the_old_frame_and_ctrl_c_is_answered(screen):
    screen.until(whole(110))
    for width, height in ((60, 16), (80, 24), (40, 10), (110, 35), (80, 24)):
        screen.resize(width, height)
        lines = screen.until(lambda lines, width=width, height=height: whole(width)(lines) if height > 10 else len(lines) < 10)
        assert len(lines) < height and max(map(len, lines)) <= width
        assert any("step 2 · generate · 0/512 rollouts" in line for line in lines)
    screen.run("send-keys", "-t", "screen", "C-c")
    lines = screen.until(lambda lines: any("finishing" in line for line in lines))
    assert "finishing step 2, Ctrl-C again stops now" in lines
    time.sleep(1.5)  # further frames
    assert whole(80)(screen.until(lambda lines: True)), "the ^C that the terminal echoes has left no line behind"
