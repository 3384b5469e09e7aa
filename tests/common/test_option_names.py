"""One word for one thing over all commands, and the neighbours' words as hints."""

import pytest
from config_classes import CLASSES

from pat_jax.batch_generation.config import GenerateConfig
from pat_jax.common.options import names
from pat_jax.common.options.declared import options_of
from pat_jax.config.run import RunConfig
from pat_jax.config.sft import RewardModelConfig, SftConfig
from pat_jax.evaluation.config import EvaluateConfig
from pat_jax.profiling.capacity.simulate_config import SimulateConfig

OPTIONS = {one: [option.name for option in options_of(one())] for one in CLASSES.values()}
# Things apart, though a neighbour has one word for both, or we have one of them only at times: a folder
# or a file, a step or a call, passes or steps, the arithmetic of a run or of another model in it.
APART = (
    {"compute_dtype", "dtype"},
    {"run_dir", "out"},
    {"prompts_per_step", "batch", "batch_size"},
    {"page_size"},
    {"epochs", "steps"},
)


def leaf(name: str) -> str:
    return name.rpartition(".")[2]


@pytest.mark.parametrize(
    ("config_class", "theirs", "ours"),
    [
        (RunConfig, "max_tokens", "rollout.max_completion_length"),  # vLLM
        (RunConfig, "actor_rollout_ref.rollout.n", "rollout.num_generations"),
        (SftConfig, "num_train_epochs", "epochs"),  # TRL
        (RewardModelConfig, "per_device_train_batch_size", "batch_size"),
        (RunConfig, "critic.optim.lr", "critic.learning_rate"),  # verl
        (RunConfig, "trainer.critic_warmup", "critic.pretrain_steps"),
        (RunConfig, "num_train_epochs", "steps"),
        (SimulateConfig, "sequences", "responses"),
        (RunConfig, "learning_rate", "optimizer.learning_rate"),  # TRL
        (RunConfig, "learning_rat", "optimizer.learning_rate"),
        (RunConfig, "critc.learning_rate", "critic.learning_rate"),
        (RunConfig, "data.val_files", "eval.data"),  # verl
        (SftConfig, "data.val_files", "eval.data"),
        (EvaluateConfig, "data.val_files", "data.files"),
    ],
)
def test_a_neighbours_word_is_answered_with_ours(config_class, theirs: str, ours: str):
    known = OPTIONS[config_class]
    assert ours in known and names.meant(theirs, known) == ours
    assert f"did you mean --{ours} " in str(names.unknown(theirs, known))


@pytest.mark.parametrize(
    "theirs", ["data.validation_set", "data.test_path", "val_fils", "data.eval"]
)
def test_what_is_held_out_is_never_answered_with_what_is_trained_on(theirs: str):
    known = [*OPTIONS[RunConfig], "data"]  # its short form
    near = names.meant(theirs, known)
    assert near is None or near.startswith("eval.")


@pytest.mark.parametrize(
    ("theirs", "instead"),
    [
        ("vf_coef", "--critic.learning_rate"),
        ("algorithm.kl_ctrl.type", "--algorithm.kl_target"),
        ("reward_model_path", "--reward model:DIR"),  # TRL
        ("colocate_all_models", "--placement interleave or separate"),  # OpenRLHF
        ("async_train", "--placement.lag 1"),  # OpenRLHF
        ("async_training.staleness_threshold", "--placement.lag 1"),  # verl
        ("resource_pool", "--placement.critic"),  # verl
        ("remote_rm_url", "--reward http://"),
        ("total_episodes", "--steps"),
    ],
)
def test_what_no_option_means_is_answered_with_what_to_do(theirs: str, instead: str):
    sentence = str(names.unknown(theirs, OPTIONS[RunConfig]))
    assert sentence.startswith(f"option --{theirs} is not offered: ")
    assert instead in sentence


@pytest.mark.parametrize("config_class", OPTIONS)
def test_every_word_of_a_line_leads_to_the_same_option(config_class):
    known = OPTIONS[config_class]
    for same in names._SAME:
        ours = [name for name in known if name in same or leaf(name) in same]
        for word in set(same) - set(map(leaf, known)) if ours else ():
            assert "." in word or names.meant(word, known) in ours


def test_every_line_is_of_an_option_that_is_there():
    used = {word for known in OPTIONS.values() for name in known for word in (name, leaf(name))}
    assert [same[0] for same in names._SAME if not used & set(same)] == []


def test_one_word_for_one_thing_over_all_commands():
    used = {leaf(name) for known in OPTIONS.values() for name in known}
    twice = [words for same in names._SAME if len(words := used & set(same)) > 1]
    assert [words for words in twice if words not in APART] == []


@pytest.mark.parametrize("config_class", OPTIONS)
def test_how_others_sample_is_no_mistake_of_typing(config_class):
    known = OPTIONS[config_class]
    for name in [x for word in names._NOT_OFFERED for x in (word, f"rollout.{word}")]:
        word = leaf(name)
        same = {each for line in names._SAME if word in line for each in line}
        if name in known or word in map(leaf, known) or same & {*known, *map(leaf, known)}:
            continue  # it is there, by this name or by ours
        assert names.meant(name, known) is None
        sentence = str(names.unknown(name, known))
        assert sentence == f"option --{name} is not offered here: leave it out (see --help)."


@pytest.mark.parametrize("word", ["temprature", "frequency"])
def test_a_mistake_of_typing_is_one(word: str):
    assert "not offered" not in str(names.unknown(word, OPTIONS[GenerateConfig]))
