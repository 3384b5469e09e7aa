"""The command line: what wins over what, and one sentence for every mistake."""

import dataclasses
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pat_jax.common.errors import UserError
from pat_jax.config import command_line as cli
from pat_jax.config.data import DataConfig
from pat_jax.config.run import RolloutConfig, RunConfig
from pat_jax.config.sft import SftConfig
from pat_jax.models.presets import PRESETS as SHAPES

PRESETS = sorted(path.stem for path in cli.PRESETS.glob("*.yaml"))
GIVEN = ["--model", "some/model", "--data", "some/data.jsonl"]


@pytest.fixture
def config_file(tmp_path: Path):
    def write(text: str) -> str:
        path = tmp_path / "mine.yaml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def mistake(*argv: str) -> str:
    with pytest.raises(UserError) as caught:
        cli.parse(argv)
    message = str(caught.value)
    assert "\n" not in message and message.endswith((".", "?"))
    return message


@pytest.mark.parametrize(
    ("config_class", "line", "rate"),
    [
        (RunConfig, "", 1e-6),
        (RunConfig, "--lora.rank 8", 1e-5),
        (RunConfig, "--lora.adapter folder", 1e-5),
        (RunConfig, "--lora.rank 8 --optimizer.learning_rate 1e-6", 1e-6),
        (RunConfig, "--preset qwen3-8b --model m --data d.jsonl --lora.rank 8", 1e-5),
        (RunConfig, "--preset demo --lora.rank 8", 3e-4),  # a preset's own number stays
        (SftConfig, "", 2e-5),
        (SftConfig, "--lora.rank 8", 2e-4),
    ],
)
def test_adapters_learn_ten_times_as_fast_unless_a_rate_is_given(
    config_class, line, rate, config_file
):
    words = line.split() if line.startswith("--preset") else ["--model", "mine", *line.split()]
    config = cli.parse(words, config_class)
    assert config.optimizer_in_use.learning_rate == pytest.approx(rate, rel=1e-12)
    # Read back from the folder of a run it is the same.
    again = cli.parse(["--config", config_file(cli.dump(config))], config_class)
    assert again == config


def test_the_demo_is_chosen_where_neither_model_nor_data_is_named(config_file):
    """With either, what --help says of the others holds."""
    demo, plain = cli.parse([]), RunConfig()
    assert demo.optimizer.learning_rate == 3e-4 and plain.optimizer.learning_rate is None
    assert cli.parse(["--steps", "7"]) == dataclasses.replace(demo, steps=7)
    wanted_by_name = {
        "model": dataclasses.replace(plain, model="mine"),
        "data": dataclasses.replace(plain, data=DataConfig(files=("mine",))),
    }
    for name, wanted in wanted_by_name.items():
        assert cli.parse([f"--{name}", "mine"]) == wanted
        assert cli.parse(["--config", config_file(f"{name}: mine\n")]) == wanted
    asked = cli.parse(["--model", "tiny", "--preset", "demo"])
    assert asked == dataclasses.replace(demo, model="tiny")


def test_the_command_line_wins_over_files_and_files_over_the_preset(config_file, tmp_path: Path):
    path = config_file("steps: 7\nseed: 3\nrollout:\n  temperature: 0.5\n")
    argv = ["--steps", "9", "--config", path, *GIVEN, "--preset", "qwen3-8b"]
    config = cli.parse(argv)
    assert (config.steps, config.seed, config.rollout.temperature) == (9, 3, 0.5)
    assert (config.model, config.rollout.prompts_per_step) == ("some/model", 128)
    assert cli.parse(argv[2:] + argv[:2]) == config
    later = tmp_path / "later.yaml"
    later.write_text("steps: 8\n")
    assert cli.parse([f"--config={path}", f"--config={later}"]).steps == 8


def test_hyphens_stand_for_underscores():
    config = cli.parse(["--run-dir", "there", "--rollout.top-p=0.5", "--compute-dtype", "bfloat16"])
    assert (config.run_dir, config.rollout.top_p) == ("there", 0.5)
    assert "unknown option --run-dirs" in mistake("--run-dirs", "x").replace("_", "-")


def test_the_file_reads_one_e_minus_six_as_a_number(config_file):
    path = config_file("optimizer: {learning_rate: 1e-6}\nrollout.top_k: 5\n")  # YAML 1.1: text
    assert cli.parse(["--config", path]).optimizer.learning_rate == 1e-6
    assert cli.parse(["--config", path]).rollout.top_k == 5


def test_what_older_runs_wrote_is_read_as_what_stands_for_it_now(config_file):
    """Only in files: on the command line an option that is gone is refused."""
    older = "rollout: {compile: lazy}\nplacement: {tail: 0, overlap: gradients}\n"
    older += "critic: {lora: {targets: []}}\nspeculation: {stagger: auto, longest: 7}\n"
    config = cli.parse(["--config", config_file(older)])
    assert config.rollout.compile == "needed"
    with pytest.raises(UserError, match=r"placement\.tail in .*line 1 is not offered: "):
        cli.parse(["--config", config_file("placement: {tail: 64}\n")])
    assert "--rollout.compile is 'lazy'" in mistake("--rollout.compile", "lazy")


def test_several_rewards_and_their_weights(config_file):
    config = cli.parse(["--reward", "math", "m:f", "--reward_weights", "1", "-0.5"])
    assert config.reward == ("math", "m:f") and config.reward_weights == (1.0, -0.5)
    path = config_file(cli.dump(config))
    assert cli.parse(["--config", path]) == config
    one = cli.parse(["--config", config_file("reward: math\nreward_weights: 2\n")])
    assert one.reward == ("math",) and one.reward_weights == (2.0,)
    assert cli.parse([]).reward_weights == ()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--reward a:f b:g --reward_weights 1", "is '1': expected one number for each of the 2 in"),
        ("--reward a:f b:g --reward_weights 0 0", "is '0 0': expected one at least that is not 0"),
        ("--reward_weights 1e7", "is '1e+07': expected numbers of size 1e-06 to 1,000,000"),
        ("--reward_weights nan", "is 'nan': expected one number or several"),
    ],
)
def test_weights_that_are_not_those_of_the_rewards(options: str, message: str):
    words = options.split() if "--reward " in options else ["--reward", "exact", *options.split()]
    assert f"option --reward_weights {message}" in mistake(*words)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_valid_and_says_what_it_is(name: str):
    assert cli.parse(["--preset", name, *GIVEN]).data.files == ("some/data.jsonl",)
    assert (cli.PRESETS / f"{name}.yaml").read_text().startswith("# ")


def test_a_quick_start_names_its_model_and_data():
    for name in ("qwen2.5-0.5b", "qwen2.5-7b", "smollm2-135m"):
        config = cli.parse(["--preset", name])
        assert config.model.lower().endswith(f"/{name}-instruct")
        assert config.data.files == ("openai/gsm8k:main/train",) != config.eval.data
        assert config.rollout.max_prompt_length == 512


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--rollout.tempature 1", "unknown option --rollout.tempature: did you mean"),
        ("--qqqq 1", "unknown option --qqqq: --help all lists every option."),
        ("--rollout 1", "--rollout is a section: write --rollout.OPTION (see --help)."),
        ("--rollout.compile lazy", "option --rollout.compile is 'lazy': expected one of needed,"),
        ("--steps ten", "option --steps is 'ten': expected an integer."),
        ("--eval.temperature nan", "option --eval.temperature is 'nan': expected a number."),
        ("--compute_dtype fp8", "option --compute_dtype is 'fp8': expected one of auto, float32"),
        ("--steps", "option --steps has no value: expected an integer."),
        ("steps=1", "unexpected 'steps=1': write --steps 1."),
        ("--rollout.top_p 0", "option --rollout.top_p is 0.0: expected a number in (0, 1]."),
        (
            "--rollout.prompts_per_step 8 --algorithm.mini_batch_size 3",
            "option --algorithm.mini_batch_size is 3: expected a divisor of"
            " --rollout.prompts_per_step (8).",
        ),
        (
            "--layout dp1tp8@4,dp2tp4",
            "option --layout is 'dp1tp8@4,dp2tp4': expected auto, a layout",
        ),
        ("--resume", "option --run_dir is '': expected with --resume the folder of the run"),
        ("--config nowhere.yaml", "cannot read nowhere.yaml: No such file or directory."),
    ],
)
def test_a_mistake_on_the_command_line_is_one_sentence(argv: str, message: str):
    assert mistake(*argv.split()).startswith(message)


def test_a_sections_name_may_stand_for_one_of_its_options(config_file):
    names = ("a.jsonl", "data/*.parquet", "c.json")
    as_yaml = yaml.safe_dump({"data": list(names)})
    for argv in (
        ["--data", *names, "--steps", "3"],
        ["--steps", "3", "--data.files", *names],
        ["--steps", "3", "--config", config_file(as_yaml)],
        ["--steps", "3", "--config", config_file(f"data:\n  files: {list(names)}\n")],
    ):
        config = cli.parse(argv)
        assert (config.data.files, config.steps) == (names, 3)
        assert cli.parse(["--config", config_file(cli.dump(config))]) == config
    assert cli.parse(["--data=a.jsonl", "--data", "b c.jsonl"]).data.files == ("b c.jsonl",)
    assert cli.parse(["--config", config_file("data: one.jsonl\n")]).data.files == ("one.jsonl",)
    assert cli.parse(["--config", config_file("data:\n")]) == cli.parse([])
    with pytest.raises(UserError, match="--rollout is a section"):
        cli.parse(["--rollout", "a"])


@pytest.mark.parametrize(
    ("argv", "text", "message"),
    [
        ("--data", "", "option --data has no value: expected one text or several."),
        (
            "--preset qwen3-0.6b --model x",
            "",
            "option --data.files is '' in preset qwen3-0.6b, line 3: expected a value (it has no",
        ),
        ("", "data: [a, null]", "option --data.files is 'null' in FILE, line 1: expected one text"),
        ("", "data: [[a]]", "option --data.files is 'a YAML sequence' in FILE, line 1: expected"),
        ("", "data: a\ndata.files: b", "option --data.files is given twice in FILE, line 2: keep"),
    ],
)
def test_a_mistake_in_several_values(config_file, argv: str, text: str, message: str):
    path = config_file(text)
    assert message.replace("FILE", path) in mistake(*argv.split(), "--config", path)


def test_an_unknown_preset_names_those_there_are():
    assert mistake("--preset", "qwen") == (
        f"option --preset is 'qwen': expected one of {', '.join(PRESETS)}."
    )


def test_a_shape_and_a_preset_are_told_apart():
    assert "--model qwen3-30b-a3b" in mistake("--preset", "qwen3-30b-a3b")
    assert "--preset qwen2.5-0.5b" in mistake("--model", "qwen2.5-0.5b", "--data", "d.jsonl")
    assert cli.parse(["--preset", "qwen3-8b", *GIVEN, "--model", "qwen3-8b"]).model == "qwen3-8b"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "steps: 3\nrollout:\n  tempature: 1\n",
            "unknown option --rollout.tempature in FILE, line 3: did you mean --rollout.temperature",
        ),
        ("\nsteps: many\n", "option --steps is 'many' in FILE, line 2: expected an integer."),
        ("steps: -1\n", "option --steps is -1 in FILE, line 1: expected an integer from 0 to"),
        ("steps: [1]\n", "option --steps is 'a YAML sequence' in FILE, line 1: expected an"),
        ("rollout: 3\n", "rollout in FILE, line 1 is no list of `name: value`."),
        ("seed: 1\nseed: 2\n", "option --seed is given twice in FILE, line 2: keep one."),
        ("seed: 1\nsteps: 3: 4\n", "cannot read FILE, line 2: not YAML, mapping values"),
        ("steps: \x01\n", "cannot read FILE: expected YAML text of options, in UTF-8."),
    ],
)
def test_a_mistake_in_a_file_names_the_file_and_the_line(config_file, text: str, message: str):
    path = config_file(text)
    assert mistake("--config", path).startswith(message.replace("FILE", path))


def test_a_file_that_is_not_text_is_refused(tmp_path: Path):
    (tmp_path / "weights").write_bytes(b"\xff\xfe\x00")
    assert "in UTF-8" in mistake("--config", str(tmp_path / "weights"))


@pytest.mark.parametrize("text", ["# nothing\n", "rollout:\n"])
def test_an_empty_file_or_section_changes_nothing(config_file, text: str):
    assert cli.parse(["--config", config_file(text)]) == cli.parse([])


@settings(max_examples=25)
@given(
    steps=st.integers(0, 10**9),
    rate=st.floats(0, 1),
    text=st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1),
    resume=st.booleans(),
)
@example(steps=0, rate=0.0, text="a\x85b", resume=False)
def test_a_dumped_configuration_reads_back_equal(tmp_path_factory, steps, rate, text, resume):
    config = RunConfig(steps=steps, model=f"m{text}", run_dir=text, resume=resume)
    config = dataclasses.replace(
        config, optimizer=dataclasses.replace(config.optimizer, learning_rate=rate)
    )
    path = tmp_path_factory.mktemp("config") / "config.yaml"
    path.write_bytes(cli.dump(config).encode())
    assert cli.parse(["--config", str(path)]) == config
    names = {f.name for f in dataclasses.fields(config)}
    assert set(yaml.safe_load(path.read_text())) == names


@pytest.mark.parametrize("page", ["nothing", "rollout.top_p"])
def test_a_page_of_help_that_is_none_is_one_sentence(page: str):
    with pytest.raises(
        UserError, match=rf"^--help has no page '{page}': expected one of .*, all\.$"
    ):
        cli.parse(["--help", page])


def test_help_lists_every_option_with_explanation_and_default(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.parse(["--steps", "nonsense", "--help", "all"], prog="python -m pat_jax.train")
    assert caught.value.code == 0
    text = capsys.readouterr().out
    blocks = dict(re.findall(r"^  --(\S+) (.*\n(?: {8}.*\n?)+)", text, re.MULTILINE))
    names = {f.name for f in dataclasses.fields(RunConfig)}
    names -= {x.name for x in dataclasses.fields(RunConfig) if dataclasses.is_dataclass(x.type)}
    names |= {f"rollout.{f.name}" for f in dataclasses.fields(RolloutConfig)}
    assert names | {"preset", "config"} <= set(blocks)
    assert "Softmax temperature" in blocks["rollout.temperature"]
    assert "(default: 1.0)" in blocks["rollout.temperature"]
    assert blocks["data"].startswith("one text or several, or --data.files (default: arithmetic)")
    assert "{auto,int8,fp8}" in blocks["rollout.weights"]
    assert max(map(len, text.splitlines())) <= 100


def test_a_model_of_the_demonstration_begins_as_the_demonstration_does():
    demo, moe = cli.parse([]), cli.parse(["--model", "demo-moe", "--steps", "20"])
    assert moe == dataclasses.replace(demo, model="demo-moe", steps=20) and moe.warm_start.steps > 0
    assert cli.parse(["--model", "demo-moe", "--warm_start.steps", "0"]).warm_start.steps == 0
    assert cli.parse(["--model", "demo-moe", "--data", "a.jsonl"]).warm_start.steps == 0
    for other in ("tiny-moe", "demo-out/export", "demo_run", "demonstration"):
        assert cli.parse(["--model", other]).warm_start.steps == 0
    assert set(cli.DEMO_MODELS) == {name for name in SHAPES if name.startswith("demo")}


@pytest.mark.parametrize("command", [RunConfig, SftConfig])
def test_a_run_has_no_folder_named_as_its_model(command):
    """The folder would be there when the model's weights are read, and be taken for them."""
    words = ["--model", "tiny", "--data", "x.jsonl", "--run_dir", "tiny"]
    with pytest.raises(UserError, match="option --run_dir is 'tiny'"):
        cli.parse(words, command, presets=None)
