"""Fill in the options that depend on model, task or machine, say what was chosen and why, and refuse early what cannot work.

Nothing here loads a model, and torch is imported only to ask whether it sees a GPU and whether Triton runs there.
"""

import dataclasses
import difflib
import re
import shutil
from dataclasses import dataclass
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path

from vipfast import gpu_fit, preflight, run_folder
from vipfast.choices import Choice, check_engine, choose_engine, choose_kernels, choose_packing, choose_parallel
from vipfast.config import FACTS, Config
from vipfast.cores import free_threads
from vipfast.distributed import join
from vipfast.errors import UsageError
from vipfast.evaluation.model import Source
from vipfast.idle import idle_options
from vipfast.inherited import inherited, starting_point
from vipfast.model_facts import ModelFacts, known_facts, model_folder, read_config
from vipfast.options.values import CUSTOM, REASONING_GYM

DATA_SUFFIXES = (".parquet", ".jsonl", ".json", ".csv")
LONGEST_PROMPT = 1024
"""Default prompt limit of models other than the starter; their positions leave far more than a rollout batch can hold."""


@dataclass(frozen=True)
class Resolved:
    """A run with every choice made; nothing after ``resolve`` asks again.

    Attributes:
        config: no option that the run reads is None or auto.
        asked: the options before.
        reasons: why each option that was auto got its value, by name.
        lines: what there is to tell of all that was decided.
    """

    config: Config
    asked: Config
    reasons: dict[str, str]
    lines: list[str]

    @property
    def saved(self) -> Config:
        """The config that a run's folder keeps: what a machine decides is left for the next one to decide."""
        decided = (name for name, facts in FACTS.items() if facts.decided)
        return dataclasses.replace(self.config, **{name: getattr(self.asked, name) for name in decided})


def resolve(config: Config, ask_torch: bool = True, gpu_bytes: float | None = None, resumed: bool = False) -> Resolved:
    """Check a config as far as that needs no model, and fill in its ``None`` fields.

    Args:
        config: options as given; already resolved ones pass unchanged.
        ask_torch: False never imports torch (``--dry-run``): a GPU is then assumed where the nvidia-smi program is.
        gpu_bytes: memory of the GPU to plan for, where torch is not asked.
        resumed: the options are a saved run's; --base-dtype auto then says that it was saved before there was a choice.

    Returns:
        The resolved run (fields of another allocator, and field names of the task, may stay None), with a line per choice, e.g.
        "learning_rate = 1e-4 (starter)".

    Raises:
        UsageError: an option that cannot work, named with its value and the remedy.
    """
    run = _Filling(config)
    source = _judged(run)
    kind = "starter" if config.model == "starter" else "LoRA" if config.lora_rank else "full fine-tuning"
    for name, value in inherited(source, config.lora_rank).items():
        run.fill(name, value, f"as in {source.run}")
    run.fill("learning_rate", {"starter": 1e-4, "LoRA": 1e-5}.get(kind, 1e-6), kind)
    _lengths(run, source)
    for name, value, why in _schedule(config):
        run.fill(name, value, why)
    run.fill("output_dir", run_folder.default_name(config, datetime.now()), "task, allocator, seed, time")
    device = _machine(run, ask_torch, gpu_bytes)
    dtype = run.config.dtype
    if config.lora_rank and config.base_dtype == "auto" and not resumed:
        run.decide("base_dtype", _base_dtype(dtype))
        run.lines.append(f"base_dtype = {run.config.base_dtype} ({run.reasons['base_dtype']})")
    if ask_torch:
        _check_ranks(run.config)
    _check_optimizer(run.config, here=ask_torch or device == "cpu")
    _engine(run, ask_torch)
    run.decide("packing", choose_packing(config.packing, device, dtype))
    run.decide("kernels", choose_kernels(config.kernels, device, ask_torch))
    gpu_bytes = total_gpu_bytes() if ask_torch and device == "cuda" else gpu_bytes
    facts = known_facts(source.base)
    run.decide("parallel", choose_parallel(run.config, facts, gpu_bytes))
    if device == "cuda":
        share = _share_of_the_gpu(run.config, facts, gpu_bytes, ask_torch)
    else:
        share = (gpu_fit.UNKNOWN_SHARE, "a CPU has no such share") if run.config.engine == "vllm" else None
    if share is not None:
        run.fill("vllm_memory", *share)
    run.lines += _choices_told(run.config, run.reasons) if ask_torch else []
    notes = [] if resumed else idle_options(config, device, run.config.engine)  # of a resumed run they have been told
    return Resolved(run.config, config, run.reasons, notes + run.lines)


def resolve_evaluation(config: Config, rows: int, samples: int, adapters: bool) -> Resolved:
    """The same for options of which only those of task, model, sampling and grading are read, and nothing is trained.

    Args:
        config: options as given.
        rows: most samples in flight on a process.
        samples: of each prompt.
        adapters: LoRA adapters are evaluated, over a base that is kept as --base-dtype says.
    """
    run = _Filling(config)
    source = _judged(run)
    for name, value in inherited(source, config.lora_rank).items():
        if name != "learning_rate":
            run.fill(name, value, f"as in {source.run}")
    _lengths(run, source)
    device = _machine(run, ask_torch=True, gpu_bytes=None)
    if adapters and config.base_dtype == "auto":
        run.decide("base_dtype", _base_dtype(run.config.dtype))
    _check_ranks(run.config)
    _engine(run, ask_torch=True)
    if run.config.engine == "vllm":
        facts = known_facts(source.base)
        if device == "cpu" or facts is None:
            share = (gpu_fit.UNKNOWN_SHARE, "a CPU has no such share" if device == "cpu" else "the model is not known yet")
        else:
            share = gpu_fit.evaluation_share(run.config, facts, total_gpu_bytes(), max(1, rows // samples), rows)
        run.fill("vllm_memory", *share)
    if device == "cuda" or run.config.engine == "vllm":
        run.lines.append(f"engine: {run.config.engine} ({run.reasons['engine']})")
    unread = idle_options(config, device, run.config.engine)
    notes = [note for note in unread if not (adapters and note.startswith("note: --base-dtype"))]
    return Resolved(run.config, config, run.reasons, notes + run.lines)


class _Filling:
    """Options on their way to a Resolved: ``config`` has what was filled in so far, ``lines`` tell of it."""

    def __init__(self, asked: Config):
        self.asked = self.config = asked
        self.lines: list[str] = []
        self.reasons: dict[str, str] = {}

    def fill(self, name: str, value, why: str) -> None:
        """Put a value where there is none, and tell."""
        if getattr(self.config, name) is None and value is not None:
            self.config = dataclasses.replace(self.config, **{name: value})
            self.lines.append(f"{name} = {_short(value)} ({why})")

    def decide(self, name: str, choice: Choice) -> None:
        """Put a value in the place of ``auto``, or of one that is no use here."""
        self.reasons[name] = choice.reason
        if getattr(self.config, name) != choice.value:
            self.config = dataclasses.replace(self.config, **{name: choice.value})


def _judged(run: _Filling) -> Source:
    """Refuse a task, reward or model that cannot be; the model's place."""
    from vipfast.rewards.choose import check_reward  # imports NumPy, which --help does without

    check_task(run.config.task)
    check_reward(run.config)
    source = starting_point(run.config.model)
    if source.base != run.config.model:
        run.config = dataclasses.replace(run.config, model=source.base)
        run.lines += source.notes
    preflight.check(run.asked, model_folder(source.base))
    return source


def _lengths(run: _Filling, source: Source) -> None:
    """Tokens of completions, of tools' outputs and of prompts."""
    starter = run.asked.model == "starter"
    run.fill("max_new_tokens", 16 if starter else 1024, "starter" if starter else "default of any other model")
    max_new_tokens = run.config.max_new_tokens
    if run.config.tools:
        run.fill("max_tool_tokens", max(1, min(512, max_new_tokens // 4)), "a quarter of max_new_tokens, at most 512")
        _check_tools(run.config, max_new_tokens, run.config.max_tool_tokens)
    run.fill("max_prompt_tokens", *_prompt_limit(run.asked, model_folder(source.base), max_new_tokens))


def _machine(run: _Filling, ask_torch: bool, gpu_bytes: float | None) -> str:
    """Threads, device and dtype; returns the device. Asking torch takes seconds, so what can be refused before has been."""
    run.fill("threads", *free_threads(run.asked.model == "starter"))
    run.fill("device", *(("cuda", "--gpu-memory-gb") if gpu_bytes else _find_device(run.asked, ask_torch)))
    run.fill("dtype", "bfloat16" if run.config.device == "cuda" else "float32", f"on {run.config.device}")
    return run.config.device


def _engine(run: _Filling, ask_torch: bool) -> None:
    """What samples; an engine that was asked for is looked for on the machine that runs alone."""
    check_engine(run.config, run.config.device)
    look = ask_torch or run.config.engine == "auto"
    run.decide("engine", choose_engine(run.config, run.config.device) if look else Choice(run.config.engine, "as asked"))


def _base_dtype(dtype: str) -> Choice:
    return Choice("bfloat16" if dtype == "bfloat16" else "float32", f"LoRA over --dtype {dtype}")


def _choices_told(config: Config, reasons: dict[str, str]) -> list[str]:
    """What samples, what computes the loss and how rollouts pass through the body of a resolved config, with the reasons;
    nothing where a CPU does as CPUs do."""
    lines, plain = [], config.device == "cpu"
    if not plain or config.engine == "vllm":
        lines.append(f"engine: {config.engine} ({reasons['engine']})")
    if not plain or config.kernels == "required":
        why = reasons["kernels"]
        lines.append(f"loss: Triton kernels ({why})" if config.kernels == "required" else f"loss: plain torch, because {why}")
    if not plain or config.packing == "masked":
        lines.append(f"packing: {config.packing} ({reasons['packing']})")
    if join().size > 1:
        lines.append(f"parallel: {config.parallel} over {join().size} processes ({reasons['parallel']})")
    return lines


def check_task(task: str) -> None:
    """Refuse a task that is no embedded task, no existing file or folder, no hub id and no procedural task."""
    if task.startswith(REASONING_GYM):
        from vipfast.tasks.reasoning_gym import parse

        parse(task)
        return
    path = Path(task).expanduser()
    if task in ("arithmetic", CUSTOM) or path.is_file() and path.suffix in DATA_SUFFIXES or path.is_dir():
        return
    kinds = (
        f"arithmetic, a {'/'.join(DATA_SUFFIXES)} file, a folder of such files, a hub dataset id such as openai/gsm8k, or "
        f"{REASONING_GYM}NAME"
    )
    if path.suffix in DATA_SUFFIXES:
        raise UsageError(f"--task {task}: no such file; give {kinds}")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w.-]+)?", task) or path.exists():
        close = difflib.get_close_matches(task.split(":")[0], ["arithmetic", REASONING_GYM])
        guess = f"did you mean {close[0]}? " if close else ""
        raise UsageError(f"--task {task}: unknown; {guess}give {kinds}")


def _check_tools(config: Config, max_new_tokens: int, max_tool_tokens: int) -> None:
    if max_tool_tokens + 2 > max_new_tokens:
        raise UsageError(
            f"--max-tool-tokens {max_tool_tokens}: leaves no room in --max-new-tokens {max_new_tokens}, which counts outputs "
            "of tools too; lower one or raise the other"
        )
    if "search" in config.tools and not Path(config.search_corpus).expanduser().exists():
        raise UsageError(f"--search-corpus {config.search_corpus}: no such file or folder")


def _schedule(config: Config) -> list[tuple[str, object, str]]:
    """What the allocator's own rules decide, once they have checked that it can spend the budget (BudgetError if not)."""
    if config.allocator == "vip":
        from vipfast.allocation import objective_and_bound

        objective, low = objective_and_bound(config)
        return [
            ("objective", objective, f"--estimator {config.estimator}"),
            ("min_rollouts", low, f"the least that means anything with {objective}"),
        ]
    if config.allocator == "vigor":
        from vipfast.allocate.vigor import Schedule

        rounds, alpha, gamma = config.vigor_num_rounds, config.vigor_alpha, config.vigor_gamma
        fitting = Schedule.fit(config.prompts_per_step, config.budget, config.vigor_m0, rounds, alpha, gamma)
        return [("vigor_m0", fitting.m0, f"{rounds} rounds that spend {config.rollouts_per_prompt:g} rollouts per prompt")]
    return []


def _prompt_limit(config: Config, folder: Path | None, max_new_tokens: int) -> tuple[int, str]:
    positions = read_config(folder).get("max_position_embeddings") if folder else None
    if positions is None:
        return LONGEST_PROMPT, f"at most {LONGEST_PROMPT} unless given; the model's positions are not known before it is loaded"
    left = positions - max_new_tokens
    if left < 1:
        raise UsageError(
            f"--max-new-tokens {max_new_tokens}: leaves no room for a prompt in the {positions} positions of "
            f"--model {config.model}; give at most {positions - 1}"
        )
    if config.max_prompt_tokens is not None and config.max_prompt_tokens > left:
        raise UsageError(
            f"--max-prompt-tokens {config.max_prompt_tokens}: with --max-new-tokens {max_new_tokens} it exceeds the "
            f"{positions} positions of --model {config.model}; give at most {left}"
        )
    if config.model != "starter" and left > LONGEST_PROMPT:
        return LONGEST_PROMPT, f"at most {LONGEST_PROMPT} unless given; {left} positions are left"
    return left, f"{positions} positions less {max_new_tokens} new tokens"


def _find_device(config: Config, ask_torch: bool) -> tuple[str, str]:
    if not ask_torch:
        found = shutil.which("nvidia-smi") is not None
        return ("cuda", "nvidia-smi is here; torch not asked") if found else ("cpu", "no nvidia-smi; torch not asked")
    if config.device == "cpu":
        return "cpu", "given"
    import torch

    if torch.cuda.is_available():
        return "cuda", torch.cuda.get_device_name()
    if config.device == "cuda":
        raise UsageError(f"--device cuda: torch {torch.__version__} sees no GPU; use --device cpu, or a torch built for CUDA")
    return "cpu", "torch sees no GPU"


def total_gpu_bytes() -> int:
    """Memory of the whole GPU this process uses."""
    import torch

    return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory


def _share_of_the_gpu(
    config: Config, facts: ModelFacts | None, gpu_bytes: float | None, ask_torch: bool
) -> tuple[float, str] | None:
    """vLLM's share of the GPU and why (None without vLLM), once what is known before loading has been found to fit."""
    if facts is None or gpu_bytes is None:
        return (gpu_fit.UNKNOWN_SHARE, "model or GPU are not known yet") if config.engine == "vllm" else None
    gpu_fit.check_training(config, facts, gpu_bytes, gpu_fit.max_shards(config))
    if ask_torch:
        gpu_fit.check_main_memory(config, facts)
    if config.engine != "vllm":
        return None
    shards = gpu_fit.num_shards(config)
    if config.vllm_memory is not None:
        gpu_fit.check_share(config, facts, gpu_bytes, shards)
        return config.vllm_memory, "given"
    return gpu_fit.vllm_share(config, facts, gpu_bytes, shards)


def _check_ranks(config: Config) -> None:
    if join().size % config.tensor_parallel_size:
        raise UsageError(
            f"--tensor-parallel-size {config.tensor_parallel_size}: must divide the number of processes, {join().size}; use "
            "another size, or another torchrun --nproc-per-node"
        )
    if join().size > 1 and config.round_mode != "barrier" and config.correction == "lagged":
        raise UsageError(
            f"--correction lagged: its predictor would learn different things on each process with --round-mode "
            f"{config.round_mode}; use --round-mode barrier, or --correction fresh"
        )


def _check_optimizer(config: Config, here: bool) -> None:
    asked = {"--offload-optimizer": config.offload_optimizer, "--optimizer adamw8bit": config.optimizer == "adamw8bit"}
    for name in filter(asked.get, asked):
        if config.parallel == "fsdp" and join().size > 1:
            raise UsageError(f"{name}: its moments cannot be split over GPUs; use --parallel ddp, or leave it out")
    if config.offload_optimizer and config.device == "cpu":
        raise UsageError("--offload-optimizer: with --device cpu AdamW's moments are in main memory already; leave it out")
    if config.optimizer == "adamw8bit" and here and find_spec("bitsandbytes") is None:
        raise UsageError("--optimizer adamw8bit: needs the bitsandbytes library; pip install 'vipfast[adamw8bit]'")


def _short(value) -> str:
    """1e-4 rather than 0.0001; everything else as it prints."""
    return f"{value:.0e}".replace("e-0", "e-") if isinstance(value, float) and value < 0.01 else str(value)
