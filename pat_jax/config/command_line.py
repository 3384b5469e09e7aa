"""The command line: defaults < preset < --config files < --section.name value.

Knows argv and which source wins over which. What options there are, how files spell them and how
they are explained is in `options/`; what an option means, in the configuration class.
"""

import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import yaml

from pat_jax.common.bars import note
from pat_jax.common.errors import UserError, together
from pat_jax.common.options.declared import (
    Option,
    build,
    every_option,
    named,
    options_of,
)
from pat_jax.common.options.files import Setting, expanded, preset_names, read_preset, read_yaml
from pat_jax.common.options.help import help_text
from pat_jax.common.options.names import UNKNOWN, no_option, resolved, twice
from pat_jax.common.rules import OptionError
from pat_jax.config.run import RunConfig
from pat_jax.models.presets import PRESETS as SHAPES
from pat_jax.models.presets import shape_lines
from pat_jax.version import __version__

PRESETS = Path(__file__).parent / "presets"
DEMO = "demo"  # the preset of a run that names no data
# Options of a preset that belong to its data: they go if the user brings other data.
OF_ITS_DATA = (
    *("data.system_prompt", "data.prompt_key", "data.answer_key"),
    *("eval.data", "warm_start.steps"),
)
DEMO_MODELS = (DEMO, "demo-moe", "demo-bigmac")  # built-in shapes that use this preset
OF_SHAPES = "Built-in shapes: architectures that --model names, which begin with random weights."

Config = TypeVar("Config")


def parse(
    argv: Sequence[str],
    config_class: type[Config] = RunConfig,
    *,
    prog: str = "python -m pat_jax.train",
    presets: Path | None = PRESETS,
    only: Collection[str] | None = None,
) -> Config:
    """Returns the configuration that `argv` (without the program's name) asks for. Raises UserError
    with one sentence about the first mistake, and SystemExit after printing help or version.

    Args:
      argv: `--name value`, `--name=value`, or `--name` alone for a boolean; `-` stands for `_`.
      config_class: a frozen dataclass of bool, int, float, str, Literal, tuple[str, int or float,
        ...] or nested dataclass fields, each with a default, or of these or None.
      prog: how the command is called, for the usage in --help.
      presets: the folder of the YAML files that --preset can name; None offers none.
      only: the only options to read; others may need a file that is not found yet. None reads all.
    """
    default = config_class()
    own = list(options_of(default))
    options = named(own)
    every = named(every_option(default))
    sources = _sources(presets)
    if asked := [i for i, word in enumerate(argv) if word in ("-h", "--help")]:
        page = "".join(word for word in argv[asked[0] + 1 :][:1] if not word.startswith("-"))
        lists = {"model": [OF_SHAPES, "", *shape_lines()]} if "model" in options else {}
        _answer(help_text(default, list(sources.values()), own, prog, page, lists))
    if "--version" in argv:
        _answer(f"pat_jax {__version__}")
    settings, of_preset = _settings(list(_scan(argv, sources | options)), presets, every, default)
    if only is not None:
        settings = {name: one for name, one in settings.items() if name in only}
        of_preset = {name: one for name, one in of_preset.items() if name in only}
    return _built(default, every, settings, of_preset)


def _built(
    default: Any,
    options: Mapping[str, Option],
    settings: Mapping[str, Setting],
    of_preset: Mapping[str, Setting],
) -> Any:
    """Returns `default` with these settings, and notes which of the preset's gave way. Raises
    OptionError with the place of a mistake."""
    kept = {name: one for name, one in of_preset.items() if name not in settings}
    left = []
    if "data.files" in settings and "data.files" in of_preset:
        is_other = [*settings["data.files"].texts] != [*of_preset["data.files"].texts]
        left = [name for name in OF_ITS_DATA if is_other and kept.pop(name, None)]
    while True:
        known = {**kept, **settings}
        try:
            built = build(default, {name: one.texts for name, one in known.items()}, options)
            break
        except OptionError as error:
            if not _gives_way(error.name, kept.pop(error.name, None)):
                where = known[error.name].where if error.name in known else ""
                raise OptionError(error.name, error.value, error.expected, where) from None
            left.append(error.name)
    if left:
        preset, *_ = of_preset[left[0]].where.split(",")
        note(f"note: left out{preset}, as your own options exclude them: {', '.join(left)}")
    return built


def _answer(text: str) -> NoReturn:
    """Prints a text instead of returning a configuration, and exits."""
    print(text)
    raise SystemExit(0)


def dump(config: Any) -> str:
    """Returns a configuration as YAML. `--config` reads it back to an equal one. Options that are
    None are left out, as they are None if not given."""
    found: dict[str, Any] = {}
    for option in options_of(config):
        *sections, name = option.name.split(".")
        place = found
        for section in sections:
            place = place.setdefault(section, {})
        if option.default is not None:
            place[name] = option.default
    options: Any = {"sort_keys": False, "allow_unicode": True, "explicit_end": True}
    return yaml.dump(found, Dumper=_Dumper, **options)


class _Dumper(yaml.SafeDumper):
    """Escapes the line break U+0085, which YAML would read back as a space."""


def _text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    style = '"' if "\x85" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style)


_Dumper.add_representer(str, _text)


def _sources(presets: Path | None) -> dict[str, Option]:
    """Returns the options that read others from files: --config, and --preset if there are any."""
    config = Option("config", str, "", "A YAML file of options; may be given more than once.")
    if presets is None:
        return {"config": config}
    names = ", ".join(preset_names(presets))
    words = f"A ready-made run: {names}. If neither --data nor another --model is given: {DEMO}."
    return {"preset": Option("preset", str, "", words), "config": config}


def _scan(argv: Sequence[str], options: Mapping[str, Option]) -> Iterator[tuple[str, list[str]]]:
    """Yields the full name of each option in `argv`, and the texts of its values. Then raises
    UserError about the words that are no options, if there are any."""
    given: dict[str, tuple[str, list[str]]] = {}
    with together(UNKNOWN) as errors:
        for name, option, texts in _options(list(argv), options, errors):
            if not texts:
                raise UserError(f"option --{name} has no value: expected {option.expected}.")
            before, others = given.setdefault(option.name, (name, texts))
            if {before, name} - options.keys() and before != name and others != texts:
                raise twice(f"--{before} {shlex.join(others)}", f"--{name} {shlex.join(texts)}")
            yield option.name, texts


def _options(
    rest: list[str], options: Mapping[str, Option], errors: list[UserError]
) -> Iterator[tuple[str, Option, list[str]]]:
    """Yields each option, the name that it is given by, and its values; appends to `errors` what is
    wrong with other words."""
    while rest:
        word = rest.pop(0)
        name, has_value, text = word.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        try:
            if not word.startswith("--"):
                raise no_option(word, options)
            option = options[resolved(name, options)]
        except UserError as error:
            errors.append(error)
            if word.startswith("--") and not has_value:
                rest[: _count(rest)] = []
            continue
        yield name, option, [text] if has_value else _take_values(rest, option)


def _take_values(rest: list[str], option: Option) -> list[str]:
    """Removes the option's values from the front of `rest`, and returns them."""
    count = _count(rest) if option.takes_many else min(_count(rest), 1)
    values = rest[:count]
    rest[:count] = []
    return ["true"] if option.kind is bool and not values else values


def _count(rest: Sequence[str]) -> int:
    """Returns how many words are before the next option."""
    return next((i for i, word in enumerate(rest) if word.startswith("--")), len(rest))


def _gives_way(name: str, of_preset: Setting | None) -> bool:
    """Whether a preset's option is left out where the user's own exclude it. Others are left: what
    a name stands for, an empty value, which the user has to replace, and `train`, which decides
    what the run is for."""
    if of_preset is None or name == "train":
        return False
    return any(of_preset.texts) and not of_preset.where.startswith(" by ")


def _settings(
    words: Sequence[tuple[str, Sequence[str]]],
    presets: Path | None,
    options: Mapping[str, Option],
    config: Any,
) -> tuple[dict[str, Setting], dict[str, Setting]]:
    """Returns the values that the user gives, and those of the preset. --name wins over --config,
    and --config over --preset."""
    settings: dict[str, Setting] = {}
    for name, (text, *_) in words:
        if name == "config":
            settings |= _read(text, options, config)
    words_set = {name: Setting(texts) for name, texts in words if name in options}
    settings |= expanded(words_set, options)
    if presets is None:
        return settings, {}
    named = [text for name, (text, *_) in words if name == "preset"]
    model = settings["model"].texts[0] if "model" in settings else DEMO
    _check_kinds(named[-1] if named else DEMO, model, preset_names(presets))
    has_data = any(name.partition(".")[0] == "data" for name in settings)
    if not named and (has_data or model not in DEMO_MODELS):
        return settings, {}
    preset = read_preset(presets, named[-1] if named else DEMO, options)
    return settings, expanded(preset, options)


def _check_kinds(preset: str, model: str, presets: Sequence[str]) -> None:
    """Raises OptionError if a shape is given as a preset, or a preset as a model."""
    if preset in SHAPES and preset not in presets:
        raise OptionError(
            "preset", preset, f"a ready-made run; for this shape write --model {preset}"
        )
    if model in presets and model not in SHAPES and not Path(model).exists():
        raise OptionError(
            "model", model, f"a model; for this ready-made run write --preset {model}"
        )


def _read(path: str, options: Mapping[str, Option], config: Any) -> dict[str, Setting]:
    """Reads a YAML file of these options, or of those of the run that `config` plans."""
    found = read_yaml(Path(path), path, options)
    if not found.keys() <= named(options_of(config)).keys():
        found = config.of_run(found)
    return expanded(found, options)
