"""The command `evaluate --reward_model`: the accuracy of a reward model on preference pairs."""

import time
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from pat_jax.common.bars import bar
from pat_jax.common.devices import configure
from pat_jax.common.errors import UserError
from pat_jax.common.rules import require
from pat_jax.config.by_model import settled_dtype
from pat_jax.config.role_table import reward_role
from pat_jax.config.rollout import RolloutConfig
from pat_jax.evaluation.config import EvaluateConfig
from pat_jax.evaluation.folder import EvaluationFolder
from pat_jax.evaluation.pair_rewards import PairRewards, content, words
from pat_jax.evaluation.results import EvaluationResults
from pat_jax.rl.data.example_reader import PairReader, PairSplits
from pat_jax.rl.data.examples import Pair
from pat_jax.rl.data.schemas import PairSchema
from pat_jax.rl.text.tokenizer import Chat
from pat_jax.run.logging.progress import Progress
from pat_jax.run.roles.reward_models import FoundRewardModel, find_reward_model
from pat_jax.run.roles.role_models import Division
from pat_jax.run.roles.weights import check_weights
from pat_jax.run.start.heldout import set_names
from pat_jax.run.start.task import find_files
from pat_jax.training.reader import TextScorer

AT_ONCE = 128  # number of pairs scored between two updates of the progress bar


def evaluate_pairs(config: EvaluateConfig) -> EvaluationResults:
    """Evaluates --reward_model on the pairs of --data. Raises UserError if the model or a file
    cannot be used, or if no pair is short enough."""
    devices = configure(config.devices)
    options = config.reward_model
    chat = Chat(config.data.system_prompt, config.data.template_variables)
    dtype = settled_dtype(config.compute_dtype, devices[0].platform, is_checkpoint=True)
    role = reward_role(options.model, dtype, option="reward_model")
    given = find_reward_model(role, f"option --reward_model is {options.model!r}", chat=chat)
    found = _read(config, given)
    pairs = [pair for each in found.values() for pair in each.heldout]
    longest = max(len(text) for pair in pairs for text in (pair.chosen, pair.rejected))
    number = 2 * min(AT_ONCE, len(pairs))
    one = given.handle(options, longest, number, devices, Division(RolloutConfig.page_size))
    check_weights(options.model, "reward_model", head=None)
    progress = Progress(0)
    with EvaluationFolder(config) as folder:
        for name, each in found.items():
            progress.print(f"{name}: {len(each.heldout):,} pairs; {each.left_out}")
        one.reader.compile(by_need=False)
        one.load()
        start = time.perf_counter()
        rewards = iter(_score(one.scorer, pairs))
        measured = [
            PairRewards.of(name, each.heldout, np.array([next(rewards) for _ in each.heldout]))
            for name, each in found.items()
        ]
        seconds = time.perf_counter() - start
        left_out = {name: len(each.too_long) for name, each in found.items()}
        results = content(config, measured, left_out, seconds)
        whole = folder.finish(results, words(config, measured, seconds))
    progress.close()
    return whole


def _read(config: EvaluateConfig, given: FoundRewardModel) -> dict[str, PairSplits]:
    """Returns the pairs of each file or pattern of --data, by its name."""
    asked = config.reward_model.max_length
    context = given.shape.max_position
    expected = f"at most the {context:,} tokens of the context of {config.reward_model.model!r}"
    require(asked is None or asked <= context, "reward_model.max_length", asked, expected)
    reader = PairReader(
        given.tokenizer,
        asked or context,
        is_scored=True,
        schema=PairSchema(config.data.prompt_key),
        pad_id=given.pad_id,
        option="--reward_model.max_length",
        bad_rows=config.data.bad_rows,
    )
    names = config.data.files
    files = [find_files("data", [name], otherwise="", split="test") for name in names]
    found = {
        name: reader.read(paths, 1.0) for name, paths in zip(set_names(names), files, strict=True)
    }
    for name, one in found.items():
        if not one.heldout:
            raise UserError(
                f"{name} has no pairs to evaluate ({one.left_out}): expected at least one; give other files."
            )
    return found


def _score(scorer: TextScorer, pairs: Sequence[Pair]) -> Float[np.ndarray, "pairs 2"]:
    """Returns the rewards of the chosen and the rejected text of each pair."""
    rewards = []
    for i in bar(range(0, len(pairs), AT_ONCE), unit="batch"):
        both = [x for pair in pairs[i : i + AT_ONCE] for x in (pair.chosen, pair.rejected)]
        rewards += list(scorer([text.tokens for text in both]))
    return np.array(rewards, np.float64).reshape(-1, 2)
