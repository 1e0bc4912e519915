"""Which split of a task is evaluated where ``--task-split`` leaves it open."""

from dataclasses import replace
from pathlib import Path

from vipfast.config import Config
from vipfast.errors import DataError


def default_split(config: Config) -> tuple[str, str | None]:
    """The test split of ``config.task`` where it has one, else the one that trains.

    Returns:
        the split, and a line that tells it; None where there is nothing to choose, as in a file.
    """
    from vipfast.tasks.reading import rows_of

    if not has_splits(config.task):
        return "train", None
    try:
        rows_of(replace(config, task_split="test"), [])
    except DataError as error:  # a task that cannot be read at all is refused as such when it is loaded
        return "train", f"{config.task}: --task-split train, as test cannot be read ({error})"
    return "test", f"{config.task}: --task-split test, as it has one"


def has_splits(task: str) -> bool:
    """Whether it is a folder or a hub dataset."""
    from vipfast.tasks.reading import HUB_ID

    path = Path(task).expanduser()
    return path.is_dir() or not path.exists() and HUB_ID.fullmatch(task) is not None
