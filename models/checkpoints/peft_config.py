"""Reads adapter_config.json as PEFT 0.21 does; an error names the field that is not supported.

Knows every field of PEFT's `LoraConfig`. Does not know any tensor.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from pat_jax.common.errors import UserError, shown
from pat_jax.common.json_text import read_json_object

ADAPTER_CONFIG = "adapter_config.json"
MOST_ALPHA = 10**6  # the limit of --lora.alpha
MODULES_TO_SAVE = "modules_to_save"  # modules that are trained and stored as a whole
TARGET_PARAMETERS = "target_parameters"  # parameters of experts and routers
# The pattern by which PEFT 0.21 doubles the rank and alpha of `gate_up_proj`, if the targets were
# gate and up separately (`target_modules` all-linear, or names of transformers 4).
GATE_UP = r".*\.gate_up_proj"

# Fields that say how an adapter is applied, with PEFT's defaults.
_DEFAULTS: Mapping[str, object] = {
    **{"r": 8, "lora_alpha": 8, "bias": "none", "init_lora_weights": True, TARGET_PARAMETERS: None}
}
# Initializations of a and b that leave the base unchanged. All others move a part of the base into
# the adapter; the adapter's base is then the remainder, which is in no file.
_INITS = ("gaussian", "eva", "orthogonal", "mica")
# Fields that turn on what is not implemented here, unless they are null, false or empty.
_NOT_IMPLEMENTED = (
    *("use_rslora", "use_dora", "use_qalora", "use_bdlora", "lora_bias", "fan_in_fan_out"),
    *("rank_pattern", "alpha_pattern", MODULES_TO_SAVE, "trainable_token_indices"),
    *("layer_replication", "megatron_config", "alora_invocation_tokens", "arrow_config"),
    *("kasa_config", "velora_config", "monteclora_config"),
)
# Fields that have no effect on a trained adapter, or only together with a field above. Those in the
# first line choose linear layers; the file's tensors show which were chosen.
_WITHOUT_EFFECT = (
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path"),
    *("revision", "inference_mode", "lora_dropout", "runtime_config", "megatron_core"),
    *("ensure_weight_tying", "qalora_group_size", "loftq_config", "eva_config", "corda_config"),
    "lora_ga_config",
)
KNOWN_FIELDS = frozenset([*_DEFAULTS, *_NOT_IMPLEMENTED, *_WITHOUT_EFFECT])
_CHOOSE_ANOTHER = "other adapters are not implemented; choose one without it"
_SAVE_AGAIN = "save the adapter again"


@dataclass(frozen=True)
class PeftConfig:
    """The fields of adapter_config.json, for a plain LoRA adapter."""

    path: Path
    fields: Mapping[str, Any]  # values by name; fields with PEFT's defaults may be missing

    @property
    def doubles_gate_up(self) -> bool:
        rank, alpha = self.fields["r"], self.fields["lora_alpha"]
        patterns = self.fields.get("rank_pattern"), self.fields.get("alpha_pattern")
        are_numbers = _is_number(rank) and _is_number(alpha)
        return are_numbers and patterns == ({GATE_UP: 2 * rank}, {GATE_UP: 2 * alpha})

    def has_parameter(self, name: str) -> bool:
        """Whether the adapter's targets choose this parameter, by PEFT's rules for names."""
        targets = self.fields[TARGET_PARAMETERS] or []
        return any(f".{name}".endswith(f".{target}") for target in targets)

    def error(self, name: str, expected: str, advice: str = _SAVE_AGAIN) -> UserError:
        value = shown(self.fields[name]) if name in self.fields else "missing"
        return UserError(f"{self.path}: field '{name}' is {value}, expected {expected}; {advice}.")


def read_peft_config(directory: str | Path, saved: Collection[str] = ()) -> PeftConfig:
    """Reads and checks the configuration in an adapter's directory. Raises UserError if the
    directory holds no adapter, or one of an unknown kind.

    Args:
      saved: modules that the adapter may hold as a whole (`modules_to_save`).
    """
    path = Path(directory) / ADAPTER_CONFIG
    if not path.is_file():
        raise UserError(
            f"{directory}: there is no {ADAPTER_CONFIG}, expected the directory of a PEFT adapter; check "
            "the path."
        )
    fields = {**_DEFAULTS, **read_json_object(path)}
    config = PeftConfig(path, fields)
    _check_kind(config, saved)
    _check_values(config)
    return config


def _check_kind(config: PeftConfig, saved: Collection[str]) -> None:
    """Raises UserError unless the adapter is a plain one that leaves its base unchanged."""
    fields = config.fields
    if fields.get("peft_type") != "LORA":
        raise config.error("peft_type", "'LORA'", _CHOOSE_ANOTHER)
    if fields["bias"] not in ("none", None):
        raise config.error("bias", "'none'", _CHOOSE_ANOTHER)
    whole = fields.get(MODULES_TO_SAVE)
    implemented = set[str]()
    if config.doubles_gate_up:
        implemented |= {"rank_pattern", "alpha_pattern"}
    if isinstance(whole, list) and all(module in saved for module in whole):
        implemented.add(MODULES_TO_SAVE)
    for name in _NOT_IMPLEMENTED:
        if fields.get(name) and name not in implemented:
            raise config.error(name, "null, false or nothing in it", _CHOOSE_ANOTHER)
    for name in sorted(fields.keys() - KNOWN_FIELDS):
        # Later versions of PEFT have more fields. A variant of LoRA is on if its field is true, a
        # non-empty object or a non-empty list. A number or a word is only a setting of a variant.
        if fields[name] is True or (isinstance(fields[name], list | dict) and fields[name]):
            raise config.error(name, "only fields that PEFT 0.21 has", _CHOOSE_ANOTHER)
    init = fields["init_lora_weights"]
    if not (init is None or type(init) is bool or str(init).lower() in _INITS):
        raise config.error(
            "init_lora_weights",
            f"true, false or one of {', '.join(map(repr, _INITS))}, as all others of PEFT change the base",
            "merge the adapter into its base in PEFT, or save it there as a plain one with "
            "path_initial_model_for_weight_conversion",
        )


def _check_values(config: PeftConfig) -> None:
    rank, alpha = config.fields["r"], config.fields["lora_alpha"]
    if not _is_number(rank) or not float(rank).is_integer() or rank < 1:
        raise config.error("r", "an integer above 0")
    if not _is_number(alpha) or not 0 < alpha <= MOST_ALPHA:
        raise config.error("lora_alpha", f"a number above 0 and up to {MOST_ALPHA:,}")
    names = config.fields[TARGET_PARAMETERS]
    is_list = isinstance(names, list) and all(type(name) is str for name in names)
    if not (names is None or is_list):
        raise config.error(TARGET_PARAMETERS, "a list of parameters' names")


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e30
