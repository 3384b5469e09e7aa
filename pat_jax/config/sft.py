"""Every option of supervised fine-tuning, checked where it is declared.

The string under a field is its help text on the command line. Names are TRL's where it has one.
"""

import json
from dataclasses import dataclass, field
from typing import Literal

from pat_jax.common.hosts.options import DistributedConfig
from pat_jax.common.options.declared import SHORT_FORM, auto
from pat_jax.common.rules import (
    COUNT,
    DEVICES,
    MEMORY_GIB,
    RESPONSES,
    SEED,
    STEPS,
    check,
    count,
    positive,
    require,
)
from pat_jax.config.data import JSON_OBJECT, WHOLE_TEXT
from pat_jax.config.evaluation import check_schedule
from pat_jax.config.learning import OptimizerConfig
from pat_jax.config.lora import LoraConfig, check_lora
from pat_jax.config.rollout import ComputeDtype
from pat_jax.config.run import CheckpointConfig
from pat_jax.config.tracking import check_tracking
from pat_jax.rl.example_files import ExampleColumns
from pat_jax.rl.tokenizer import Chat


@dataclass(frozen=True)
class SftDataConfig:
    """Examples to learn from."""

    files: tuple[str, ...] = field(default=(), metadata=SHORT_FORM)
    """JSON, JSON-lines or Parquet files of examples, patterns of their names ('data/*.parquet'), or
    datasets of the Hugging Face Hub (owner/name:config/split, as `train --help` says): prompt and
    completion, messages, or text."""
    prompt_key: str = ""
    """Column of the prompt, text or chat messages; `a.b` is field b of column a. Empty: prompt."""
    completion_key: str = ""
    """Column of what is to be said, text or chat messages. Empty: completion."""
    messages_key: str = ""
    """Column of chats. Empty: messages."""
    text_key: str = ""
    """Column of texts, every token of which is learned. Empty: text."""
    system_prompt: str = ""
    """System message of chats that have none."""
    chat_template_kwargs: str = ""
    """Variables of the chat template, a JSON object such as '{"enable_thinking": false}'."""

    def __post_init__(self):
        check(self, "files", (all, "names that are not empty"), "data.")
        check(self, "chat_template_kwargs", JSON_OBJECT, "data.")
        check(self, "system_prompt", WHOLE_TEXT, "data.")

    @property
    def chat(self) -> Chat:
        return Chat(self.system_prompt, json.loads(self.chat_template_kwargs or "{}"))

    @property
    def columns(self) -> ExampleColumns:
        return ExampleColumns(
            self.prompt_key, self.completion_key, self.messages_key, self.text_key
        )


@dataclass(frozen=True)
class SftEvalConfig:
    """The loss on held-out examples."""

    every: int = 100
    """Steps between two evaluations; 0 evaluates never. The first and the last policy are always
    evaluated otherwise."""
    data: tuple[str, ...] = ()
    """Files of examples to evaluate on, read like those of --data; none holds out a share of --data."""
    share: float = 0.05
    """Share of --data that is held out, by the hash of the prompt, the chat or the text."""
    num_examples: int = 256
    """Held-out examples that are evaluated, at most."""

    def __post_init__(self):
        check(self, "share", (lambda x: 0 < x < 1, "a number in (0, 1)"), "eval.")
        check(self, "num_examples", RESPONSES, "eval.")
        check_schedule(self, self.every, self.data)


@dataclass(frozen=True)
class SftConfig:
    """Teaches a language model by examples: completions of prompts, chats or texts, packed into rows.
    `python -m pat_jax.train --model taught` can go on from what this exports.

        python -m pat_jax.sft --model Qwen/Qwen2.5-0.5B --data examples/lessons.jsonl \\
            --checkpoint.export_dir taught
    """

    model: str = ""
    """A Hugging Face checkpoint directory, or a model of the Hugging Face Hub (owner/name)."""
    epochs: float = 1.0
    """Passes over the examples."""
    steps: int = 0
    """Optimizer steps; 0 takes --epochs."""
    batch_size: int = 32
    """Examples in one optimizer step. The loss is the mean over all their tokens that are learned."""
    max_length: int = auto()
    """Longest example in tokens, at most the model's context; longer ones are left out and counted.
    auto: 1,024, or the context if that is shorter."""
    truncate: bool = False
    """Cut longer examples at max_length instead."""
    completion_only_loss: bool = True
    """Of prompt and completion, learn the completion alone."""
    assistant_only_loss: bool = True
    """Of messages, learn what the assistant says alone, in each of its turns."""
    tokens_per_micro_batch: int = 8192
    """Token budget (rows x length, all devices together) of one forward-backward pass; gradients
    accumulate over the rest."""
    seed: int = 0
    """Seed of the order of the examples."""
    devices: int = 0
    """Devices to use, of all processes together; 0 takes all (on CPU the largest power of two up
    to min(cores, 8) in each process)."""
    device_memory_gib: float = 0.0
    """Memory of one device in GiB; 0 asks the device."""
    compute_dtype: ComputeDtype = "auto"
    """Arithmetic of the forward pass; master weights are kept in --optimizer.weight_dtype. auto:
    bfloat16 on GPUs and TPUs, float32 on CPUs."""
    remat: Literal["full", "attention", "dots", "none"] = "full"
    """What the backward pass keeps of each layer, the rest being computed anew: its input alone (full),
    the output of attention too, so that its kernel runs forward once (attention), the products with
    weights as well (dots), or all (none). Least memory first, least arithmetic last."""
    scan_layers: Literal["auto", "true", "false"] = "auto"
    """Run the layers of an update as a loop, which compiles in the time of one layer but reads their
    parameters from a copy in compute_dtype; auto does on TPUs, and on CPUs in float32, for models of at
    least 8 layers."""
    run_dir: str = ""
    """Folder of the run; empty makes runs/<date-time>."""
    trackers: tuple[str, ...] = ()
    """Where metrics go beside metrics.jsonl and TensorBoard: wandb, trackio or both."""
    tracker_project: str = "pat_jax"
    """Name of the project there; a run is called like its folder."""
    resume: bool = False
    """Continue the run in run_dir from its last checkpoint; with `auto` if there is a run, else begin
    it: one command for the first start and every restart."""
    data: SftDataConfig = field(default_factory=SftDataConfig)
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(schedule="cosine"))
    lora: LoraConfig = field(default_factory=LoraConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    eval: SftEvalConfig = field(default_factory=SftEvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    def __post_init__(self):
        check(self, "epochs", positive(10**6))
        check(self, "steps", STEPS)
        check(self, "batch_size", RESPONSES)
        if self.max_length is not None:
            check(self, "max_length", count(2, 2**24))
        check(self, "tokens_per_micro_batch", COUNT)
        check(self, "seed", SEED)
        check(self, "devices", DEVICES)
        check(self, "device_memory_gib", MEMORY_GIB)
        check_tracking(self)
        check_lora(self.lora, self.optimizer, learns=True, export_dir=self.checkpoint.export_dir)
        require(
            not self.resume or self.run_dir != "",
            "run_dir",
            self.run_dir,
            "with --resume the folder of the run to continue",
        )

    @property
    def optimizer_in_use(self) -> OptimizerConfig:
        """With its learning rate."""
        return self.optimizer.with_rate(2e-5, trains_adapters=self.lora.is_on)

    @property
    def trains_adapters(self) -> bool:
        """And nothing else."""
        return self.lora.is_on

    @property
    def micro_batch_option(self) -> str:
        """What sets the size of a micro-batch, and to what."""
        return f"--tokens_per_micro_batch ({self.tokens_per_micro_batch})"

    @property
    def learned_from(self) -> str:
        return "examples (--max_length)"
