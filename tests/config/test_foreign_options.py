"""Options of TRL, verl, OpenRLHF and vLLM, typed to our commands: each is answered, and rightly."""

import re
from pathlib import Path

import pytest
import yaml
from config_classes import CLASSES

from pat_jax.common.errors import UserError
from pat_jax.common.options import names
from pat_jax.common.options.declared import options_of
from pat_jax.common.options.help import BESIDE
from pat_jax.config import command_line as cli
from pat_jax.config.from_python import words

LISTS = yaml.safe_load(Path(__file__).with_name("foreign_options.yaml").read_text("utf-8"))
FOREIGN = sorted(
    {
        name.replace("-", "_")
        for lists in LISTS.values()
        for words in lists.values()
        for name in words.split()
    }
)
KNOWN = {
    command: {name for one in options_of(made()) for name in (one.name, one.short) if name}
    for command, made in CLASSES.items()
}
HINT = re.compile(r"unknown option --[\w.]+: did you mean --([\w.]+)\?")


def answer(name: str, command: str = "train") -> str:
    """What `command` prints about an option. Of a hint only the option that it names."""
    sentence = str(names.unknown(name, KNOWN[command]))
    hint = HINT.fullmatch(sentence)
    return f"--{hint[1]}" if hint else sentence


def named(sentence: str) -> set[str]:
    return set(re.findall(r"--(\w+(?:\.\w+)*)", sentence))


def mistake(*argv: str) -> str:
    with pytest.raises(UserError) as caught:
        cli.parse(argv)
    return str(caught.value)


def test_the_lists_are_whole():
    counts = {
        title: sum(len(one.split()) for one in lists.values()) for title, lists in LISTS.items()
    }
    assert counts == {
        "TRL 1.16.0": 360,
        "transformers 5.24.0, the base of TRL's": 114,
        "PEFT 0.21.2": 42,
        "verl 0.9.1": 898,
        "OpenRLHF 0.11.2": 405,
        "vLLM 0.33.0": 297,
    }


@pytest.mark.parametrize("command", CLASSES)
def test_every_name_is_answered_with_options_that_are_there(command: str):
    known = KNOWN[command]
    for name in set(FOREIGN) - known:
        sentence = str(names.unknown(name, known))
        assert "--help all lists every option" not in sentence, name
        assert named(sentence) - {name, "help"} <= known, sentence
        assert sentence.endswith((".", "?")) and "\n" not in sentence


@pytest.mark.parametrize("command", CLASSES)
def test_no_name_is_answered_by_its_spelling(command: str, monkeypatch: pytest.MonkeyPatch):
    answers = {name: answer(name, command) for name in FOREIGN}
    monkeypatch.setattr(
        names, "get_close_matches", lambda word, words, *_: {word} & {*words} and [word]
    )
    assert {name: answer(name, command) for name in FOREIGN} == answers


def test_every_answer_counts_for_some_command():
    for _, text in names._ANSWERS:
        assert any(named(text) <= known for known in KNOWN.values()), text


# What people type most, checked by hand against what the option does there and here.
SAME = {
    # TRL
    "model_name_or_path": "model",
    "dataset_name": "data",
    "reward_funcs": "reward",
    "output_dir": "run_dir",
    "learning_rate": "optimizer.learning_rate",
    "lr_scheduler_type": "optimizer.schedule",
    "warmup_steps": "optimizer.warmup_steps",
    "weight_decay": "optimizer.weight_decay",
    "adam_beta2": "optimizer.b2",
    "max_grad_norm": "optimizer.max_grad_norm",
    "max_steps": "steps",
    "num_generations": "rollout.num_generations",
    "num_generations_eval": "eval.num_generations",
    "max_completion_length": "rollout.max_completion_length",
    "temperature": "rollout.temperature",
    "top_k": "rollout.top_k",
    "beta": "algorithm.beta",
    "num_iterations": "algorithm.num_iterations",
    "epsilon_high": "algorithm.epsilon_high",
    "importance_sampling_level": "algorithm.ratio",
    "scale_rewards": "algorithm.scale_rewards",
    "vllm_importance_sampling_mode": "algorithm.rollout_correction",
    "vllm_importance_sampling_clip_max": "algorithm.rollout_correction_cap",
    "teacher_model_name_or_path": "teacher.model",
    "lora_r": "lora.rank",
    "lora_target_modules": "lora.targets",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.max_to_keep",
    "eval_steps": "eval.every",
    # verl
    "data.train_files": "data",
    "data.val_files": "eval.data",
    "data.train_batch_size": "rollout.prompts_per_step",
    "data.max_prompt_length": "rollout.max_prompt_length",
    "data.max_response_length": "rollout.max_completion_length",
    "actor_rollout_ref.model.path": "model",
    "critic.model.path": "critic.model",
    "actor_rollout_ref.actor.optim.lr": "optimizer.learning_rate",
    "critic.optim.lr": "critic.learning_rate",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "algorithm.mini_batch_size",
    "actor_rollout_ref.actor.ppo_epochs": "algorithm.num_iterations",
    "actor_rollout_ref.actor.clip_ratio_high": "algorithm.epsilon_high",
    "actor_rollout_ref.actor.clip_ratio_c": "algorithm.delta",
    "actor_rollout_ref.actor.kl_loss_coef": "algorithm.beta",
    "actor_rollout_ref.actor.kl_loss_type": "algorithm.kl_estimator",
    "actor_rollout_ref.actor.entropy_coeff": "algorithm.entropy_coef",
    "actor_rollout_ref.actor.loss_agg_mode": "algorithm.loss_aggregation",
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload": "optimizer.offload",
    "actor_rollout_ref.rollout.n": "rollout.num_generations",
    "actor_rollout_ref.rollout.temperature": "rollout.temperature",
    "actor_rollout_ref.rollout.val_kwargs.temperature": "eval.temperature",
    "actor_rollout_ref.rollout.val_kwargs.n": "eval.num_generations",
    "actor_rollout_ref.model.lora_rank": "lora.rank",
    "critic.model.lora.rank": "critic.lora.rank",
    "algorithm.adv_estimator": "algorithm.name",
    "algorithm.kl_ctrl.target_kl": "algorithm.kl_target",
    "trainer.total_training_steps": "steps",
    "trainer.project_name": "tracker_project",
    "trainer.save_freq": "checkpoint.every",
    "trainer.test_freq": "eval.every",
    "trainer.critic_warmup": "critic.pretrain_steps",
    "distillation.distillation_loss.topk": "teacher.top_k",
    # OpenRLHF
    "actor.model_name_or_path": "model",
    "data.prompt_dataset": "data",
    "data.input_key": "data.prompt_key",
    "data.label_key": "data.answer_key",
    "rollout.batch_size": "rollout.prompts_per_step",
    "rollout.n_samples_per_prompt": "rollout.num_generations",
    "train.max_epochs": "algorithm.num_iterations",
    "actor.adam.lr": "optimizer.learning_rate",
    "critic.adam.lr": "critic.learning_rate",
    "algo.kl.init_coef": "algorithm.beta",
    "algo.advantage.lambd": "algorithm.lam",
    "ckpt.output_dir": "checkpoint.export_dir",
    "ckpt.path": "run_dir",
    # vLLM
    "max_tokens": "rollout.max_completion_length",
    "n": "rollout.num_generations",
    "quantization": "rollout.weights",
    "block_size": "rollout.page_size",
}
OTHERWISE = {  # what the answer has to have in it
    "per_device_train_batch_size": "--algorithm.mini_batch_size",
    "gradient_accumulation_steps": "--algorithm.tokens_per_micro_batch",
    "num_train_epochs": "--steps",
    "max_length": "--rollout.max_prompt_length",
    "logging_steps": "is not needed: every step is logged",
    "report_to": "--trackers",
    "gradient_checkpointing": "--remat",
    "bf16": "--compute_dtype",
    "use_vllm": "is not needed: responses are generated by an engine of pat_jax",
    "vllm_gpu_memory_utilization": "--rollout.device_memory_gib",
    "vllm_tensor_parallel_size": "--layout",
    "loss_type": "--algorithm.name",
    "mask_truncated_completions": "--algorithm.truncated mask",
    "use_peft": "--lora.rank",
    "packing": "is not needed",
    "completion_only_loss": "pat_jax.sft",
    "resume_from_checkpoint": "--resume",
    "sapo_temperature_pos": "is not offered here",
    "entropy_coef_max": "is not offered here",
    "trainer.n_gpus_per_node": "--devices",
    "trainer.logger": "--trackers",
    "actor_rollout_ref.rollout.name": "is not needed: responses are generated by an engine",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "--layout",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "--algorithm.tokens_per_micro_batch",
    "actor_rollout_ref.actor.use_kl_loss": "--algorithm.beta",
    "actor_rollout_ref.actor.fsdp_config.param_offload": "--roles.rest",
    "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": "--optimizer.warmup_steps",
    "critic.optim.weight_decay": "the critic's optimizer is the policy's",
    "reward.reward_model.rollout.temperature": "reward models read whole texts",
    "custom_reward_function.path": "--reward FILE.py:FUNCTION",
    "algorithm.filter_groups.enable": "--algorithm.dynamic_sampling",
    "ref.model_name_or_path": "the reference is the model at the start",
    "reward.overlong_buffer_len": "is a share of --rollout.max_completion_length",
    "vllm.num_engines": "--placement.rollout",
    "train.batch_size": "--algorithm.mini_batch_size",
    "zpg": "--fsdp_size",
    "optimizers": "is AdamW",
    "max_num_seqs": "is not needed: the engine starts responses",
    "enable_prefix_caching": "is not needed: responses of a group share",
    "min_p": "is not offered here",
}
OF_OTHER_COMMANDS = [
    ("sft", "num_train_epochs", "--epochs"),
    ("sft", "per_device_train_batch_size", "--batch_size counts"),
    ("sft", "dataset_text_field", "--data.text_key"),
    ("sft", "packing", "is not needed: rows of a batch"),
    ("sft", "loss_type", "--loss cross_entropy"),
    ("sft", "critic.model.path", "is not offered here"),
    ("sft", "max_seq_length", "--max_length"),
    ("reward_model", "data.max_len", "--max_length"),
    ("reward_model", "model.margin_loss_enable", "--data.margin_key"),
    ("generate", "max_model_len", "--max_length"),
    ("generate", "max_num_seqs", "--batch"),
    ("generate", "min_tokens", "--min_completion_length"),
    ("generate", "tensor_parallel_size", "--layout"),
    ("generate", "learning_rate", "is not offered here"),
    ("evaluate", "data.val_files", "--data.files"),
    ("plan", "rollout.top_k", "--lengths is where"),
]


@pytest.mark.parametrize(("name", "ours"), SAME.items())
def test_an_option_is_answered_with_ours(name: str, ours: str):
    assert answer(name) == f"--{ours}"


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        (
            "--no-enable-prefix-caching",
            "option --no_enable_prefix_caching is not offered: responses of a group share the pages",
        ),
        ("--no-enforce-eager", "option --no_enforce_eager is not offered: XLA compiles"),
        (
            "--no-deterministic",
            "unknown option --no_deterministic: did you mean --deterministic false",
        ),
        ("--no-log-completions", "--log_completions false?"),
        ("--no-repeat-ngram-size", "is not offered here: leave it out"),
    ],
)
def test_a_switch_that_is_turned_off_is_answered(word: str, sentence: str):
    assert sentence in mistake(word)


@pytest.mark.parametrize(("name", "words"), OTHERWISE.items())
def test_an_option_is_answered_with_what_to_do(name: str, words: str):
    assert answer(name).startswith(f"option --{name} is not ") and words in answer(name)


@pytest.mark.parametrize("name", ["show_switch", "switch_to"])
def test_a_path_that_an_answer_shows_is_taken(name: str):
    (path,) = re.findall(r"\w+tp\d[\w,@]*", answer(name))
    assert cli.parse([f"--layout={path}"]).layout == path


@pytest.mark.parametrize(("command", "name", "words"), OF_OTHER_COMMANDS)
def test_a_command_has_its_own_answers(command: str, name: str, words: str):
    assert words in answer(name, command)


@pytest.mark.parametrize(
    ("word", "written"),
    [
        ("actor_rollout_ref.rollout.n=8", "--rollout.num_generations 8"),
        ("++trainer.total_training_steps=20", "--steps 20"),
        ("data.train_files=['a b.parquet','c.parquet']", "--data 'a b.parquet' c.parquet"),
        ("algorithm.adv_estimator=grpo", "--algorithm.name grpo"),
        ("algorithm.adv_estimator=gae", "--algorithm.name and one of grpo, dr_grpo"),
        ("rollout.top_p=0.9", "--rollout.top_p 0.9"),
        ("data.answer_key=the answer", "--data.answer_key 'the answer'"),
    ],
)
def test_a_word_of_verl_is_translated(word: str, written: str):
    assert mistake(word).startswith(f"unexpected {word!r}: write {written}")


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("trainer.nnodes=2", "option --trainer.nnodes is not offered: all devices of all hosts"),
        ("nothing.like=it", "unknown option --nothing.like: --help all lists every option."),
        ("runs/a=b", "unexpected 'runs/a=b': options are written --name value."),
    ],
)
def test_a_word_without_an_option_of_ours_is_answered(word: str, sentence: str):
    assert mistake(word).startswith(sentence)


AT_ONCE = {"output_dir": "out", "use_vllm": True, "r": 8}


SECTIONS = {
    "actor_rollout_ref": {"actor": {"optim": {"lr": 1e-6}}, "rollout": {"n": 5, "name": "vllm"}},
    "critic": {"optim": {"lr": 1e-5}},
    "trainer": {"nnodes": 1},
    "algorithm": {"adv_estimator": "grpo"},
}


@pytest.mark.parametrize("is_file", [True, False])
def test_the_options_in_sections_of_verl_are_answered_one_by_one(is_file: bool, tmp_path: Path):
    (tmp_path / "verl.yaml").write_text(yaml.dump(SECTIONS))
    with pytest.raises(UserError) as caught:
        cli.parse(["--config", f"{tmp_path / 'verl.yaml'}"]) if is_file else words(None, SECTIONS)
    said = str(caught.value)
    assert said.startswith("6 names") and "is a section" not in said
    ours = ["learning_rate", "num_generations", "responses are generated by", "critic", "algorithm"]
    assert [name for name in ours if name not in said] == []


def typed(tmp_path: Path):
    cli.parse([f"--{name}={value}" for name, value in AT_ONCE.items()])


def pasted(tmp_path: Path):
    cli.parse(["trainer.nnodes=2", "rollout.n=8", "--model", "m", "--r", "8", "9"])


def called(tmp_path: Path):
    words(None, AT_ONCE)


def in_a_file(tmp_path: Path):
    (tmp_path / "run.yaml").write_text(yaml.dump(AT_ONCE))
    cli.parse(["--config", str(tmp_path / "run.yaml")])


@pytest.mark.parametrize("give", [typed, pasted, called, in_a_file])
def test_all_names_that_are_none_of_ours_are_answered_at_once(give, tmp_path: Path):
    with pytest.raises(UserError) as caught:
        give(tmp_path)
    first, *lines = str(caught.value).split("\n")
    assert re.match("3 names", first) and len(lines) == 3


def test_from_python_no_answer_has_words_of_the_command_line():
    for name in FOREIGN[::5]:
        try:
            words(None, {name: 1})
        except UserError as error:
            assert not re.search(r"--\w", str(error))


def listed(title: str) -> set[str]:
    lists = [one for each, one in LISTS.items() if each.startswith(title)]
    return {name for one in lists for words in one.values() for name in words.split()}


THEIRS = {"TRL": listed("TRL") | listed("transformers"), "verl": listed("verl")}


def test_the_names_that_help_shows_beside_an_option_are_theirs_for_it():
    for option, text in BESIDE.items():
        for project, name in (each.split(" ") for each in text.split("; ")):
            assert any(f".{each}".endswith(f".{name}") for each in THEIRS[project])
            commands = [command for command, known in KNOWN.items() if option in known]
            here = {names.looked_up(name, KNOWN[command])[0] for command in commands}
            assert here & {option, option.removesuffix(".files"), option.removesuffix(".name")}


@pytest.mark.parametrize("project", THEIRS)
def test_help_shows_a_name_beside_each_option_that_has_one(project: str):
    known = [one.name for one in options_of(CLASSES["train"]())]
    found = {near for name in THEIRS[project] if (near := names.looked_up(name, known)[0])}
    assert len(found) > 40 and {one for one in found if project not in BESIDE.get(one, "")} == set()


@pytest.mark.parametrize("command", CLASSES)
def test_a_name_of_ours_is_never_foreign(command: str):
    for name in KNOWN[command]:
        try:
            cli.parse([f"--{name}="], CLASSES[command], presets=None)
        except UserError as error:
            assert not re.match(r"unknown option|option --\S+ is not (offered|needed)", str(error))


@pytest.mark.parametrize("command", CLASSES)
def test_the_last_part_of_a_name_of_ours_is_answered_with_ours(command: str):
    known = KNOWN[command]
    of_policy = {"reward_model.max_length", "teacher.top_k", "critic.lora.rank"}  # to others
    for name in known - of_policy:
        leaf = name.rpartition(".")[2]
        near = names.looked_up(f"x.{leaf}", known)[0]
        assert near and near.rpartition(".")[2] == leaf, name
