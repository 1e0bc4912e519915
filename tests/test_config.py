"""Config's own checks, and its way to YAML and back."""

import ast
import dataclasses
import inspect
import subprocess
import sys
from unittest import mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vipfast import atomic
from vipfast.config import Config
from vipfast.config_file import continued, load_yaml, read_yaml, save_yaml
from vipfast.errors import UsageError

FIELDS = {field.name for field in dataclasses.fields(Config)}


def write(tmp_path, text):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return path


def test_every_field_has_a_sentence_under_it():
    told = set()
    for group in (group for group in Config.__mro__ if group.__module__.startswith("vipfast.options.")):
        body = ast.parse(inspect.getsource(group)).body[0].body
        for node, after in zip(body, body[1:]):
            if isinstance(node, ast.AnnAssign) and isinstance(after, ast.Expr) and after.value.value.endswith("."):
                told.add(node.target.id)
    assert told == FIELDS


@pytest.mark.parametrize(
    ("name", "meant"),
    [("allocater", "did you mean allocator?"), ("lr", "did you mean learning_rate?"), ("Steps", "did you mean steps?"),
     ("xyzzy", "--help have all of them")],
)  # fmt: skip
def test_an_option_that_does_not_exist_is_refused_with_the_nearest(name, meant):
    with pytest.raises(UsageError) as error:
        Config(**{name: 1})
    assert str(error.value).startswith(f"{name}: no such option; ") and meant in str(error.value)
    with pytest.raises(UsageError, match=f"{name}: no such option"):
        dataclasses.replace(Config(), **{name: 1})
    assert list(inspect.signature(Config).parameters) == [field.name for field in dataclasses.fields(Config)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0.0}, "--temperature 0.0: must be above 0"),
        ({"allocator": "vpi"}, "--allocator 'vpi': must be one of uniform, vip, vigor"),
        ({"dtype": "float16"}, "--dtype 'float16': must be one of float32, bfloat16, float64"),
        ({"steps": 1.5}, "--steps 1.5: must be of type int"),
        ({"threads": "2"}, "--threads '2': must be of type int | None"),
        ({"steps": True}, "--steps True: must be of type int"),
        ({"stop": "</s>"}, r"--stop '</s>': must be a list of texts: \['</s>'\] in Python, \[</s>\] in YAML"),
        ({"reward": [1]}, r"--reward \(1,\): must be a list of texts$"),
        ({"reward_weights": ["a"]}, r"--reward-weights \('a',\): must be a list of numbers$"),
        ({"trackers": ["wandb", "board"]}, "must be a list of tensorboard, wandb, trackio$"),
        ({"steps": -1}, r"--steps -1: must lie in \[0, "),
        ({"top_p": 0.0}, r"--top-p 0.0: must lie in \(0, 1\]"),
        ({"top_p": float("nan")}, "--top-p nan: must be a finite number"),
        ({"temperature": float("inf")}, "--temperature inf: must be a finite number"),
        ({"weighting": "token", "length_term": "sequence"}, "--length-term sequence: --weighting token takes no length term"),
        ({"weighting": "rollout", "length_term": "token"}, "--length-term token: needs --weighting prompt"),
        # 3 * 2.5 = 7.5; the nearest whole budget is 8.
        ({"prompts_per_step": 3, "rollouts_per_prompt": 2.5}, "nearest that is: 2.66666666667"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_bad_option_is_named_with_value_and_remedy(options, message):
    with pytest.raises(UsageError, match=message):
        Config(**options)


def test_a_list_is_taken_where_a_tuple_is_wanted():
    lists = dict(reward=["maths", "a:b"], reward_weights=[1, 0.5], stop=[], tools=["calculator"], metadata_fields=["level"])
    assert Config(**lists) == Config(**{name: tuple(value) for name, value in lists.items()})
    assert hash(Config(**lists)) is not None


def test_budget_is_the_product():
    assert Config(prompts_per_step=64, rollouts_per_prompt=7.5).budget == 480


def test_config_imports_no_torch_and_no_command_line_library():
    code = "import sys, vipfast, vipfast.types; print(sorted({'torch', 'transformers', 'tyro'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_yaml_values_take_the_types_of_the_fields(tmp_path):
    path = write(
        tmp_path,
        "learning_rate: 1e-6\nweight_decay: 1.0e-2\nrollouts_per_prompt: 8\nthreads: null\nsteps: 3\n"
        "stop: ['<a>', \"\\n\"]\ntrackers: [wandb]\n",
    )
    values = read_yaml(path)
    assert values == {
        "learning_rate": 1e-6,
        "weight_decay": 0.01,
        "rollouts_per_prompt": 8.0,
        "threads": None,
        "stop": ("<a>", "\n"),
        "trackers": ("wandb",),
        "steps": 3,
    }
    assert type(values["rollouts_per_prompt"]) is float


def test_empty_yaml_sets_nothing(tmp_path):
    assert read_yaml(write(tmp_path, "# only a comment\n")) == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learnin_rate: 1e-6", "unknown key 'learnin_rate': did you mean 'learning_rate'?"),
        ("num-epochs: 2", "unknown key 'num-epochs': did you mean 'epochs'?"),
        ("learning-rate: 1e-6", "unknown key 'learning-rate': did you mean 'learning_rate'?"),
        ("zzz: 1", "unknown key 'zzz': see --help"),
        ("5: 1", "unknown key 5"),
        ("learner:\n  learning_rate: 1e-6\n  lr: 2", "not in sections; move learning_rate to the top level"),
        ("learning_rate:\n  peak: 1e-6", "section 'learning_rate': options stand at the top level, not in sections"),
        ("steps: 3\nseed: 1\nsteps: 4", "the key 'steps' stands there twice"),
        ("learning_rate: fast", "--learning-rate 'fast'"),
        ("allocator: vpi", "must be one of uniform, vip, vigor"),
        ("trackers: wandb", "--trackers 'wandb'"),
        ("steps: yes", "--steps True"),
        ("model: 5", "--model 5"),
        ("- steps", "must be a mapping of options such as 'steps: 60', got a list"),
        ("just words", "must be a mapping"),
        ("steps: [1", "is not valid YAML"),
    ],
)
def test_yaml_mistake_is_refused_with_file_key_and_remedy(tmp_path, text, message):
    path = write(tmp_path, text)
    with pytest.raises(UsageError) as error:
        read_yaml(path)
    assert message in str(error.value) and str(error.value).startswith(str(path))


def test_a_reward_that_earlier_versions_did_not_record_is_taken_and_one_that_was_stays():
    untold, told = Config(), Config(reward=("python",))
    config, notes = continued(untold, told)
    assert config == told and notes == ["reward = ('python',) (was ())"]
    assert continued(told, Config()) == continued(told, told) == (told, [])
    for saved, asked in ((Config(reward=("maths",)), told), (told, Config(reward=("maths",)))):
        with pytest.raises(UsageError, match="--reward is"):
            continued(saved, asked)


def test_missing_yaml_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match="--config .*absent.yaml: cannot be read"):
        read_yaml(tmp_path / "absent.yaml")


@pytest.fixture(scope="module")
def saved_path(tmp_path_factory):
    return tmp_path_factory.mktemp("run") / "config.yaml"


@settings(max_examples=15, deadline=None)
@example(Config(stop=("\x85", "\n"), learning_rate=1e-6, model="\u00e9"))
@given(
    st.builds(
        Config,
        learning_rate=st.none() | st.floats(0, 10),
        temperature=st.floats(1e-300, 1e300),
        success_threshold=st.floats(allow_nan=False, allow_infinity=False),
        stop=st.lists(st.text(st.characters(codec="utf-8"))).map(tuple),
        model=st.text(st.characters(codec="utf-8")),
        output_dir=st.none() | st.text(st.characters(codec="utf-8")),
        seed=st.integers(0, 2**63 - 1),
    )
)
def test_saved_config_comes_back_to_the_last_bit(saved_path, config):
    with mock.patch.object(atomic, "sync"):  # waiting for the disk each time shows nothing more
        save_yaml(config, saved_path)
    assert load_yaml(saved_path) == config


def test_saved_config_holds_every_option(saved_path):
    save_yaml(Config(), saved_path)
    assert set(read_yaml(saved_path)) == FIELDS


def test_the_same_options_in_python_go_on_with_a_run_of_adapters():
    asked = Config(lora_rank=2, steps=5)
    for saved in ("float32", "bfloat16"):
        run = Config(lora_rank=2, base_dtype=saved)
        assert continued(run, asked) == (dataclasses.replace(run, steps=5), ["steps = 5 (was 60)"])
    with pytest.raises(UsageError, match="--base-dtype is bfloat16, the run has float32"):
        continued(Config(lora_rank=2, base_dtype="float32"), dataclasses.replace(asked, base_dtype="bfloat16"))
