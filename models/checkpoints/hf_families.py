"""The classes of transformers whose checkpoints are read and written: families, each with a head.

Knows the field `architectures` of config.json and the number of labels. Does not know how large a
model is.
"""

from dataclasses import dataclass, replace

from pat_jax.models.checkpoints.json_fields import Fields
from pat_jax.models.config import Head, ModelConfig


@dataclass(frozen=True)
class Family:
    model_type: str  # `model_type` in config.json, `architecture` in ModelConfig
    prefix: str  # beginning of the names of this family's classes
    attention_bias: bool = False
    qk_norm: bool = False
    has_experts: bool = False
    norm_eps: float = 1e-6  # default if config.json lacks the field, as is `rope_theta`
    rope_theta: float = 10_000.0


@dataclass(frozen=True)
class HeadClass:
    """The kind of head that classes of transformers with this suffix have."""

    suffix: str  # end of the classes' names
    head: Head
    has_bias: bool = False


@dataclass(frozen=True)
class HFClass:
    """A class of transformers: a family of models with a kind of head."""

    family: Family
    of_head: HeadClass

    @property
    def name(self) -> str:
        return self.family.prefix + self.of_head.suffix


QWEN3_MOE = Family("qwen3_moe", "Qwen3Moe", qk_norm=True, has_experts=True)
MIXTRAL = Family("mixtral", "Mixtral", has_experts=True, norm_eps=1e-5, rope_theta=1_000_000.0)
# Qwen3-MoE with experts narrower than the layer; transformers has no such model.
BIGMAC = replace(QWEN3_MOE, model_type="bigmac", prefix="BigMac")
FAMILIES = (
    Family("llama", "Llama"),
    Family("qwen2", "Qwen2", attention_bias=True),
    Family("qwen3", "Qwen3", qk_norm=True),
    QWEN3_MOE,
    MIXTRAL,
    BIGMAC,
)
CAUSAL = HeadClass("ForCausalLM", "vocab")
OF_SEQUENCES = HeadClass("ForSequenceClassification", "scalar")
OF_TOKENS = HeadClass("ForTokenClassification", "scalar", has_bias=True)
HEADS = (CAUSAL, OF_SEQUENCES, OF_TOKENS)
CLASSES = tuple(HFClass(family, of_head) for family in FAMILIES for of_head in HEADS)
_LABELS = "one label, as reward models and critics have"


def class_of(config: ModelConfig) -> HFClass:
    """Returns the class that a model is written as."""
    wanted = config.architecture, config.head, config.head_bias
    return next(
        x for x in CLASSES if (x.family.model_type, x.of_head.head, x.of_head.has_bias) == wanted
    )


def read_class(fields: Fields, head: Head | None) -> HFClass:
    """Returns the class of the model that config.json describes. Raises UserError if the class is
    unknown or has several labels, or if it has a scalar head but `head` is `vocab`.

    Args:
      head: the head that the model is to have, or None if either will do.
    """
    found = _named_class(fields, head)
    if found.of_head.head == "scalar":
        if head == "vocab":
            raise fields.error(
                "architectures",
                f"['{HFClass(found.family, CAUSAL).name}'], as this model, a reward model or critic, has "
                "one number for each token and cannot generate",
                "choose a checkpoint that can",
            )
        _check_labels(fields)
    return found


def _named_class(fields: Fields, head: Head | None) -> HFClass:
    supported = ", ".join(HFClass(family, CAUSAL).name for family in FAMILIES)
    if head != "vocab":
        supported += f", or of these families {OF_SEQUENCES.suffix} or {OF_TOKENS.suffix}"
    advice = "choose a checkpoint of one of these architectures"
    if fields.has("architectures"):  # a bare config saved by transformers has only a model_type
        for each in CLASSES:
            if fields.values["architectures"] == [each.name]:
                return each
        raise fields.error("architectures", f"one of {supported}", advice)
    for family in FAMILIES:
        if fields.values.get("model_type") == family.model_type:
            return HFClass(family, CAUSAL)
    raise fields.error("model_type", f"the type of one of {supported}", advice)


def _check_labels(fields: Fields) -> None:
    """Raises UserError unless the model has one label. transformers counts those in `id2label`."""
    advice = "choose a checkpoint with one"
    if fields.has("id2label") and len(fields.section("id2label").values) != 1:
        raise fields.error("id2label", _LABELS, advice)
    if fields.has("num_labels") and fields.integer("num_labels") != 1:
        raise fields.error("num_labels", f"1: {_LABELS}", advice)
    if not (fields.has("id2label") or fields.has("num_labels")):
        raise fields.error("id2label", f"{_LABELS}, since without names there are two", advice)
