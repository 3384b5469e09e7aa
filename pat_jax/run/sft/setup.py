"""Builds the parts of a run of supervised fine-tuning. All mistakes in options and files are found
here, before anything is compiled or written."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pat_jax.common.devices import Device
from pat_jax.common.errors import UserError
from pat_jax.common.hub import is_checkpoint
from pat_jax.common.rules import require
from pat_jax.config.by_model import settled_examples
from pat_jax.config.sft import SftConfig
from pat_jax.engine.sizing.device_memory import memory_limit
from pat_jax.engine.warm_up.kernel_check import usable_kernels
from pat_jax.layout.layout import factored_mesh, layout_chain
from pat_jax.models.config import ModelConfig
from pat_jax.models.policy import Policy
from pat_jax.rl.algorithm.supervised import to_example_batch
from pat_jax.rl.batches.batches import TrainBatch
from pat_jax.rl.batches.packing import Shape
from pat_jax.rl.data.example import Example
from pat_jax.rl.data.example_files import ExampleColumns
from pat_jax.rl.data.examples import ExampleReader, Examples, Read
from pat_jax.rl.data.text_reader import TextRead
from pat_jax.run.checkpoints.meta import check_fingerprint
from pat_jax.run.process.folder import CHECKPOINTS
from pat_jax.run.results.weights import check_weights
from pat_jax.run.sft.inputs import find_data, load_tokenizer, shape_of_model
from pat_jax.run.start.adapters import identity
from pat_jax.training.build import DTYPES, build_lora
from pat_jax.training.roles import Roles
from pat_jax.training.state_placement import check_offload
from pat_jax.training.supervised import build_supervised_trainer, row_shapes
from pat_jax.training.trainer import Trainer
from pat_jax.training.update_memory import check_state


@dataclass(frozen=True)
class SftSetup:
    """The parts of a run, before anything is compiled."""

    config: SftConfig  # every `auto` settled
    policy: Policy
    trainer: Trainer
    devices: Sequence[Device]
    examples: Examples
    heldout: TrainBatch | None  # evaluated on; None: no evaluation
    num_heldout: int
    tokens_per_byte: float | None  # of held-out text; None: examples are held out, or nothing
    shapes: Sequence[Shape]  # of micro-batches
    steps: int
    note: str  # for the user: number of examples, how many were left out, what was shortened
    fingerprint: Mapping[str, object]  # a checkpoint must have the same to be resumed
    memory: float  # bytes of a device


def build(config: SftConfig, devices: Sequence[Device]) -> SftSetup:
    """Builds all parts of a run. Raises UserError if anything in the configuration or its files
    cannot work. Cheap checks come first: options, headers of files. Then come the tokenizer and the
    examples, which take seconds. Weights, which may have to be downloaded, come last."""
    config, model, shortened = _settled(config, devices)
    policy = Policy.from_config(model)
    lora = identity(build_lora(config.lora, policy))
    fingerprint = asdict(model) | {"learns_from": "examples"} | lora
    if config.resume:
        check_fingerprint(Path(config.run_dir) / CHECKPOINTS, fingerprint)
    check_offload(config.optimizer, devices)
    read, evaluated = _read(config, model)
    examples = Examples(read.train, seed=config.seed)
    steps = _steps(config, examples)
    memory = memory_limit(config, devices)
    trainer = _trainer(config, policy, devices, steps, memory)
    shapes = row_shapes(config, trainer.layout.split.dp)
    heldout = _spread(evaluated.heldout, config.eval.num_examples if config.eval.every else 0)
    check_weights(config.model)
    counts = str(read) if read is evaluated else f"{read}\neval.data, {evaluated}"
    return SftSetup(
        config,
        policy,
        trainer,
        devices,
        examples,
        to_example_batch(heldout, shapes) if heldout else None,
        len(heldout),
        evaluated.heldout.tokens_per_byte if isinstance(evaluated, TextRead) else None,
        shapes,
        steps,
        "\n".join(filter(None, [shortened, counts])),
        fingerprint,
        memory,
    )


def _trainer(
    config: SftConfig, policy: Policy, devices: Sequence[Device], steps: int, memory: float
) -> Trainer:
    """Builds the trainer. Raises UserError if a device has too little memory for its state."""
    chain, _ = layout_chain(factored_mesh(devices), policy.config)
    layout = next(iter(chain.values()))
    trainer = build_supervised_trainer(config, policy, layout, steps)
    check_state(Roles(trainer), memory)
    dtype = DTYPES[config.compute_dtype]
    names = "rows", "experts"
    kernels = usable_kernels([layout], policy.config, page_size=16, dtype=dtype, names=names)
    if kernels == layout.kernels:
        return trainer
    return build_supervised_trainer(config, policy, replace(layout, kernels=kernels), steps)


def _settled(config: SftConfig, devices: Sequence[Device]) -> tuple[SftConfig, ModelConfig, str]:
    """Returns the options with every `auto` settled, the model's shape, and the note of
    `settled_examples`."""
    model, has_weights = shape_of_model(config.model), is_checkpoint(config.model)
    require(
        config.lora.export == "merged" or has_weights,
        "lora.export",
        config.lora.export,
        f"merged with --model {config.model!r}: its base is random numbers that no other program has",
    )
    if not config.data.files:
        raise UserError(
            "option --data is not given: expected .json, .jsonl or .parquet files of examples, text files "
            "or folders; give one or several."
        )
    platform = devices[0].platform
    config, note = settled_examples(config, model.max_position, platform, is_checkpoint=has_weights)
    if config.max_length > model.max_position:
        raise UserError(
            f"option --max_length is {config.max_length}: expected at most the {model.max_position} "
            f"tokens of the context of {config.model!r} (max_position_embeddings in its config.json); "
            f"take --max_length {model.max_position}."
        )
    padded = replace(model, vocab_multiple=math.lcm(model.vocab_multiple, len(devices)))
    return config, padded, note


def _read(config: SftConfig, model: ModelConfig) -> tuple[Read | TextRead, Read | TextRead]:
    """Reads the examples to train on and those to evaluate on, from the same or other files."""
    files, heldout = find_data("data", config.data.files), config.eval.data
    evaluated_files = find_data("eval.data", heldout, split="test")
    data = config.data
    keys = data.prompt_key, data.completion_key, data.messages_key, data.text_key
    reader = ExampleReader(
        load_tokenizer(config, model),
        config.max_length,
        is_truncated=config.truncate,
        columns=ExampleColumns(*keys),
        completion_only=config.completion_only_loss,
        assistant_only=config.assistant_only_loss,
        option="--max_length",
    )
    is_split = config.eval.every > 0 and not config.eval.data
    read = reader.read(files, config.eval.share if is_split else 0.0)
    evaluated = reader.read(evaluated_files, 1.0) if heldout else read
    if not read.train:
        raise UserError(
            f"option --data is {' '.join(config.data.files)!r}, which leaves nothing to learn from "
            f"({read}): expected some examples or text; raise --max_length, take --truncate, or use more data."
        )
    if config.eval.every and not evaluated.heldout:
        raise UserError(
            f"there is nothing to evaluate ({evaluated}): expected at least one held-out example; use "
            "more data, raise --eval.share, give --eval.data, or take --eval.every 0."
        )
    return read, evaluated


def _spread(heldout: Sequence[Example], most: int) -> list[Example]:
    """Returns up to `most` examples, evenly spread: a corpus begins with its first files only."""
    count = min(most, len(heldout))
    return [heldout[i * len(heldout) // count] for i in range(count)]


def _steps(config: SftConfig, examples: Examples) -> int:
    """Returns the optimizer steps of the run. Raises UserError if the warm-up is longer."""
    steps = config.steps or math.ceil(config.epochs * examples.batches_per_epoch(config.batch_size))
    if config.optimizer.warmup_steps > steps:
        raise UserError(
            f"option --optimizer.warmup_steps is {config.optimizer.warmup_steps}: expected at most the "
            f"{steps:,} optimizer steps of the run; take fewer, or more --epochs or --steps."
        )
    return steps
