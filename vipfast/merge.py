"""LoRA adapters and their base made one model: ``python -m vipfast.merge RUN OUT`` writes it for any program to load.

RUN is a run's folder (its final model, else its newest checkpoint), RUN/final, RUN/best, RUN/checkpoints/step-N, or any folder
of adapters. Sums are taken in float32.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from vipfast import cli
from vipfast.config import Config
from vipfast.config_file import load_yaml
from vipfast.errors import UsageError
from vipfast.evaluation.model import Source, find, with_adapters
from vipfast.model_facts import model_folder, read_config
from vipfast.unread import pipes_may_close

DTYPES = ("auto", "float32", "bfloat16", "float16")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m vipfast.merge", description=__doc__.splitlines()[0])
    parser.add_argument("run", metavar="RUN", help="a run's folder, a part of it such as RUN/final, or a folder of adapters")
    parser.add_argument("out", metavar="OUT", help="the from_pretrained folder to write, which must not exist yet")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="how weights are saved; auto: as the base's own are")
    asked = parser.parse_args(argv)
    return cli.guarded(lambda ranks: _run(asked), "start the same command again; nothing was written")


def merge(name: str, out: str | Path, dtype: str = "auto") -> Path:
    """Write the model that adapters and their base make: weights, tokenizer and generation config.

    Args:
        name: RUN as above.
        out: a folder that does not exist yet.
        dtype: of the saved weights, one of ``DTYPES``; "auto" is that of the base's own files.

    Returns:
        ``out``; it is complete, or there was an error and it does not exist.

    Raises:
        UsageError: ``out`` exists, no adapters are found, their base is not there or does not fit them, or the disk is full.
    """
    out = Path(out).expanduser()
    if out.exists():
        raise UsageError(f"OUT {out}: exists already; name a folder that does not")
    with _told_as("RUN "):
        source = find(name)
    if source.adapter is None:
        raise UsageError(
            f"RUN {name}: holds no LoRA adapters (adapter_config.json); give a run with --lora-rank, a part of it such as "
            "RUN/final, or a folder of adapters"
        )
    with _told_as(f"RUN {name}: its adapters are for another model; "):
        model_folder(source.base)  # refuses a base that is not there before anything is loaded
        model = _base(source)
    with _told_as("RUN "):
        model = with_adapters(model, source).merge_and_unload()

    # torch has come by now
    import torch

    from vipfast.checkpoint import export
    from vipfast.policy import read_tokenizer

    folder = model_folder(source.base)
    described = read_config(folder) if folder else {}
    own = described.get("dtype") or described.get("torch_dtype") or "float32"
    beside = (source.adapter / "tokenizer_config.json").is_file()
    tokenizer = read_tokenizer(str(source.adapter if beside else folder or source.base))
    return export(model.to(getattr(torch, own if dtype == "auto" else dtype)), tokenizer, out)


@contextmanager
def _told_as(what: str) -> Iterator[None]:
    """Inside, an error about --model, which this command does not have, is about ``what``."""
    try:
        yield
    except UsageError as error:
        if not str(error).startswith("--model "):
            raise
        raise type(error)(f"{what}{str(error).removeprefix('--model ')}") from error


def _base(source: Source):
    """In float32, rounded as its run had it."""
    from vipfast.frozen import round_to_bfloat16
    from vipfast.policy import load_policy

    model = load_policy(Config(model=source.base, device="cpu", dtype="float32"))
    if source.run and load_yaml(source.run / "config.yaml").base_in_bfloat16:
        round_to_bfloat16(model)
    return model


def _run(asked: argparse.Namespace) -> int:
    with pipes_may_close():
        print(f"wrote {merge(asked.run, asked.out, asked.dtype)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
