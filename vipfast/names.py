"""What an option is called: the nearest name to a mistyped one, and what other trainers call the same thing."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches

from vipfast.errors import UsageError

ELSEWHERE = {
    ours: names.split()
    for ours, names in {
        "learning_rate": "lr peak_lr step_size",
        "lr_schedule": "scheduler lr_scheduler lr_scheduler_type",
        "warmup_steps": "warmup num_warmup_steps lr_warmup_steps",
        "weight_decay": "wd",
        "optimizer": "optim",
        "max_grad_norm": "grad_clip clip_grad clip_grad_norm max_norm",
        "prompts_per_step": "batch_size bs train_batch_size rollout_batch_size per_device_train_batch_size num_prompts",
        "rollouts_per_prompt": "num_generations group_size num_rollouts rollouts n samples_per_prompt n_samples_per_prompt",
        "max_new_tokens": "max_tokens max_length max_completion_length max_response_length response_length",
        "max_prompt_tokens": "max_prompt_length prompt_length",
        "beta": "kl kl_beta kl_coef kl_coeff kl_loss_coef init_kl_coef",
        "clip_low": "clip epsilon clip_eps clip_ratio cliprange clip_range epsilon_low clip_ratio_low eps_clip",
        "clip_high": "epsilon_high clip_ratio_high eps_clip_high",
        "epochs": "num_epochs ppo_epochs num_iterations mu",
        "steps": "max_steps num_steps total_steps num_train_steps total_training_steps iterations",
        "updates_per_step": "mini_batches num_minibatches num_mini_batches steps_per_generation",
        "micro_batch_tokens": "micro_batch_size ppo_micro_batch_size mini_batch_size gradient_accumulation_steps",
        "estimator": "algo algorithm adv_estimator advantage_estimator",
        "length_term": "loss_type loss_agg_mode",
        "eval_every": "eval_steps eval_interval eval_freq test_freq evaluate_every",
        "eval_samples": "num_samples",
        "heldout_prompts": "eval_size test_size num_eval",
        "checkpoint_every": "save_steps save_every save_freq save_interval checkpoint_steps",
        "keep": "save_total_limit max_checkpoints",
        "output_dir": "out output out_dir save_dir run_dir checkpoint_dir default_local_dir",
        "trackers": "report_to logger log_to tracker wandb tensorboard",
        "model": "model_name model_path model_name_or_path policy pretrain",
        "task": "data dataset dataset_name train_file train_files data_path env",
        "lora_rank": "lora lora_r rank",
        "reward": "reward_fn reward_func reward_funcs reward_function",
        "dtype": "precision bf16 fp16 torch_dtype",
        "engine": "use_vllm backend",
        "vllm_memory": "gpu_memory_utilization vllm_gpu_memory_utilization",
        "tensor_parallel_size": "tp tensor_parallel",
        "stop": "stop_sequences stop_strings eos",
        "system_prompt": "system",
        "temperature": "temp",
        "threads": "num_threads cpus",
        "reward_workers": "workers num_workers",
        "seed": "random_seed",
        "resume": "resume_from_checkpoint continue",
    }.items()
}
"""Options by the names that they have in other trainers."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Which of ``known`` was probably meant by ``name``, dashes or underscores alike; None where none is near."""
    known, asked = list(known), str(name).replace("-", "_").strip("_").lower()
    elsewhere = next((ours for ours, names in ELSEWHERE.items() if asked in names and ours in known), None)
    close = get_close_matches(asked, known, n=1) or [own for own in known if asked and own.startswith(asked)]
    return elsewhere or (close[0] if close else None)


def check_argv(
    argv: Sequence[str], known: Iterable[str], switches: Iterable[str] = (), of_training: Iterable[str] = ()
) -> None:
    """Refuse what stands on a command line under no option's name, or under one's twice.

    Args:
        argv: the arguments; what does not begin with two dashes is a value, and what follows "=" too.
        known: option names with underscores.
        switches: those of them that also have a --no- form.
        of_training: names that another command knows and this one does not read.

    Raises:
        UsageError: naming the flag, and the one that was probably meant.
    """
    known = [*known, "help"]
    given: dict[str, str] = {}
    for flag in (token.partition("=")[0] for token in argv if token.startswith("--") and token != "--"):
        name = flag[2:].replace("-", "_")
        name = next((switch for switch in switches if name == f"no_{switch}"), name)
        if name.startswith("tyro_"):  # its completion of shells
            continue
        if name in of_training:
            own = name.removeprefix("eval_")
            remedy = f"give --{own}" if own != name and own in known else "leave it out"
            raise UsageError(f"{flag}: is an option of training, which this command does not read; {remedy}")
        if name not in known:
            meant = nearest(name, known)
            remedy = f"did you mean --{meant.replace('_', '-')}?" if meant else "see --help for all options"
            raise UsageError(f"{flag}: no such option; {remedy}")
        if name in given:
            twice = f"{given[name]} and {flag}" if given[name] != flag else flag
            raise UsageError(f"{twice}: given twice; give it once, with all its values behind it")
        given[name] = flag
