"""The teacher of a run: its files, whether it fits the policy, and its weights.

Knows options and checkpoints. Does not know what is learned from it.
"""

from collections.abc import Sequence
from dataclasses import replace

from pat_jax.common.devices import Device
from pat_jax.common.hub import is_checkpoint, local_checkpoint
from pat_jax.common.rules import require
from pat_jax.config.compute import Compute
from pat_jax.config.run import RunConfig
from pat_jax.engine.sizing.draft_choice import checkpoint_shape
from pat_jax.engine.sizing.draft_vocabulary import other_tokens, tokens_in
from pat_jax.engine.warm_up.kernel_check import with_usable_kernels
from pat_jax.layout.chain import layout_chain
from pat_jax.layout.layout import Layout
from pat_jax.layout.mesh import factored_mesh, padded_for
from pat_jax.models.checkpoints.hf_load import load_params
from pat_jax.models.config import ModelConfig
from pat_jax.models.policy import Policy
from pat_jax.training.build import DTYPES, micro_shapes, predictor_of
from pat_jax.training.reader import Reader
from pat_jax.training.roles import TEACHER, Roles
from pat_jax.training.trainable_params import TrainableParams

_OPTION = "teacher.model"


def build_teacher(
    config: RunConfig, policy: Policy, layout: Layout, devices: Sequence[Device], row_shards: int
) -> dict[str, Reader]:
    """Returns the teacher by the name of its role, without weights; empty if a run has none.

    Args:
      layout: the policy's for updates. On the same devices, the teacher is split in the same way.
      devices: the teacher's.
      row_shards: the number that divides the rows of each micro-batch.

    Raises:
      UserError: there is no such model, or it does not fit the policy: another tokenizer, too short
        a context, or heads that the layout does not divide. Or more tokens are asked for than there
        are.
    """
    if not config.teacher.model:
        return {}
    shape = padded_for(devices, _shape(config, policy.config))
    if shape.padded_vocab_size < policy.config.padded_vocab_size:
        # Every token that the policy may sample has a logit, if only that of padding.
        shape = replace(shape, vocab_multiple=policy.config.padded_vocab_size)
    own, dtype = Policy.from_config(shape), DTYPES[config.compute_dtype]
    where = _layout(config, shape, layout, devices)
    predictor = predictor_of(
        Compute(config.compute_dtype), own, where, temperature=config.rollout.temperature
    )
    held = TrainableParams(own, where, weight_dtype=dtype)
    shapes = micro_shapes(config.micro_batches, row_shards, layout.platform)
    top_k = _top_k(config, policy.config, shape)
    return {TEACHER: Reader("teacher_logprobs", held, predictor, shapes, top_k=top_k)}


def load_teacher(roles: Roles, config: RunConfig) -> None:
    """Loads the teacher's weights, if there is a teacher."""
    if (reader := roles.readers.get(TEACHER)) is None:
        return
    held, folder = reader.held, local_checkpoint(config.teacher.model, option=_OPTION)
    reader.params = load_params(folder, held.policy, held.shardings, held.weight_dtype)


def _top_k(config: RunConfig, policy: ModelConfig, teacher: ModelConfig) -> int:
    top_k, most = config.teacher.top_k, min(policy.vocab_size, teacher.vocab_size)
    require(
        top_k <= most, "teacher.top_k", top_k, f"at most {most:,}, the tokens of the vocabulary"
    )
    return top_k


def _shape(config: RunConfig, policy: ModelConfig) -> ModelConfig:
    name, shape = config.teacher.model, checkpoint_shape(config.teacher.model, _OPTION)
    if shape is None:
        expected = (
            "a Hugging Face checkpoint directory or a model of the Hub, and there is no such model"
        )
        require(False, _OPTION, name, expected)
    assert shape is not None
    folder = config.model if is_checkpoint(config.model) else ""
    expected = _other_tokenizer(shape, name, policy, folder)
    require(not expected, _OPTION, name, f"{expected}; take a teacher of the same family")
    longest = config.rollout.max_length
    require(
        shape.max_position >= longest,
        _OPTION,
        name,
        f"a model for texts of {longest:,} tokens, the longest prompt and response, and this one is for "
        f"{shape.max_position:,}; take another, or allow shorter ones",
    )
    return shape


def _other_tokenizer(own: ModelConfig, name: str, policy: ModelConfig, folder: str) -> str:
    """Returns why the teacher's token ids do not fit the policy's, in words; empty if they do.

    Unlike a draft model, it has to know every token of the policy's tokenizer."""
    if why := other_tokens(own, name, policy, folder, "teacher"):
        return why
    tokens, of_policy = tokens_in(name), tokens_in(folder)
    if tokens is None or of_policy is None or not (unknown := of_policy.keys() - tokens.keys()):
        return ""
    first = min(unknown)
    return (
        f"a model with the tokens of {folder}, whose token {first} is {of_policy[first]!r}, which this "
        "one does not have"
    )


def _layout(
    config: RunConfig, model: ModelConfig, layout: Layout, devices: Sequence[Device]
) -> Layout:
    """Returns the teacher's layout with the kernels that work on these devices."""
    chain, _ = layout_chain(factored_mesh(devices), model, fsdp_size=config.fsdp_size)
    if set(devices) != layout.devices:
        layout = next(iter(chain.values()))
    expected = f"a model that the updates' layout {layout.split} divides; use fewer devices"
    require(layout.split in chain, _OPTION, config.teacher.model, expected)
    page_size, dtype = config.rollout.page_size, DTYPES[config.compute_dtype]
    return with_usable_kernels(chain[layout.split], model, page_size=page_size, dtype=dtype)
