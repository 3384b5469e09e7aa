"""The command `evaluate`: evaluates a model on problem sets."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from pat_jax.commands.evaluate_pairs import evaluate_pairs
from pat_jax.common.bars import bar
from pat_jax.common.devices import Device, configure
from pat_jax.common.errors import UserError
from pat_jax.common.hosts.join import join
from pat_jax.common.hosts.together import process_group
from pat_jax.common.hub import is_checkpoint
from pat_jax.config.by_model import settled_dtype
from pat_jax.config.role_table import reward_roles
from pat_jax.config.run import RunConfig
from pat_jax.engine.sequences.responses import Completion, Request
from pat_jax.engine.session import Session
from pat_jax.engine.sizing.memory import engine_memory
from pat_jax.evaluation.config import EvaluateConfig
from pat_jax.evaluation.folder import EvaluationFolder
from pat_jax.evaluation.problem_sets import load_problem_sets
from pat_jax.evaluation.results import EvaluationResults, content, words
from pat_jax.models.config import ModelConfig
from pat_jax.rl.rewards.responses import response_reader
from pat_jax.run.evaluation import Evaluator
from pat_jax.run.generation import sampled
from pat_jax.run.logging.completions import Completions
from pat_jax.run.logging.progress import Progress
from pat_jax.run.results.session import SessionSetup
from pat_jax.run.roles.reward_models import (
    RewardModels,
    build_reward_models,
    check_room,
    load_reward_models,
    resident_of,
)
from pat_jax.run.roles.role_models import Division
from pat_jax.run.roles.saved_policy import SavedPolicy, find_policy
from pat_jax.run.roles.weights import check_weights
from pat_jax.run.scoring import open_scorer, try_out
from pat_jax.run.start.given_rows import GivenRows
from pat_jax.run.start.setup import checked_tokenizer, model_config


def evaluate(config: EvaluateConfig, rows: GivenRows) -> EvaluationResults:
    """Evaluates a model, or a reward model. `rows` holds data that a Python program gave instead of
    files."""
    join(config.distributed)
    # The default has the time, which may differ between processes.
    config = replace(config, out=process_group().agree("out", lambda: config.out))
    with rows.placed(config.out, config.data.files) as paths:
        data = replace(config.data, files=paths(config.data.files))
        what = evaluate_pairs if config.reward_model.model else evaluate_policy
        return what(replace(config, data=data))


def evaluate_policy(config: EvaluateConfig) -> EvaluationResults:
    config, saved = with_saved(config)
    devices = configure(config.devices)
    dtype = settled_dtype(config.compute_dtype, devices[0].platform, is_checkpoint=True)
    config = replace(config, compute_dtype=dtype)
    model = model_config(config.model_options.task, config.model_options.layout_choice, devices)
    if saved:
        saved.check(model)
    run = config.run_config(model, len(devices))
    tokenizer = checked_tokenizer(run.task, model)
    problem_sets = load_problem_sets(run.task, tokenizer)
    rollout = problem_sets.fitted(run.rollout, run.eval.num_generations, len(devices))
    run = replace(run, rollout=rollout)
    setup, reward_models = _session_of(run, model, devices, saved, config.adapter)
    progress = Progress(0)
    with open_scorer(problem_sets.rewards, config.reward_limits, reward_models) as scorer:
        first = problem_sets.sets[0].prompts[0]
        try_out(scorer, first, problem_sets.columns, config.num_generations, progress)
        with EvaluationFolder(config) as folder:
            if known := len(folder.kept.before):
                progress.print(f"{known:,} responses are there already")
            notes = (*(saved.notes if saved else ()), setup.headless, *problem_sets.notes)
            for line in filter(None, notes):
                progress.print(line)
            _open_reward_models(reward_models, setup)
            session = setup.open()
            with Completions(tokenizer, folder.path, progress.print, is_asked=True) as completions:
                read = response_reader(problem_sets.columns, tokenizer)
                evaluator = Evaluator(
                    run.eval,
                    run.rollout,
                    run.seed,
                    problem_sets.sets,
                    read,
                    scorer,
                    completions,
                    progress,
                    few=config.num_completions_to_print,
                )
                ask = partial(folder.ask, partial(_answers, session))
                found = evaluator.evaluate(None, ask)
            results = content(config, found, problem_sets.left_out, folder.num_tokens)
            told = "\n".join([*found.samples, words(config, found, folder.num_tokens)])
            whole = folder.finish(results, told)
    progress.close()
    return whole


def _session_of(
    run: RunConfig,
    model: ModelConfig,
    devices: Sequence[Device],
    saved: SavedPolicy | None,
    adapter: str,
) -> tuple[SessionSetup, RewardModels]:
    judges = reward_roles(run, devices[0].platform)
    division = Division(run.rollout.page_size)
    reward_models = build_reward_models(judges, run.reward_model, run.rollout, devices, division)
    setup = SessionSetup.of(
        run.engine,
        run.task,
        model,
        devices,
        saved,
        profile=run.profile,
        adapter=adapter,
        resident=resident_of(reward_models),
    )
    for one in reward_models.values():
        check_weights(one.model.role.source, "reward", head=None)
    return setup, reward_models


def _open_reward_models(models: RewardModels, setup: SessionSetup) -> None:
    """Compiles the programs of reward models, and loads their weights."""
    for one in models.values():
        one.reader.compile(by_need=False)
    if models:
        check_room(models, engine_memory(setup.engine.specs, setup.rollout, setup.resident))
    load_reward_models(models)


def with_saved(config: EvaluateConfig) -> tuple[EvaluateConfig, SavedPolicy | None]:
    """Returns the options, and with --run_dir the checkpoint to evaluate, which the options then
    name. Raises UserError if there is none, or if the model is not a checkpoint directory."""
    saved = find_policy(config.run_dir, config.checkpoint) if config.run_dir else None
    if saved:
        dtype = saved.compute_dtype if config.compute_dtype == "auto" else config.compute_dtype
        name = config.model or saved.model
        config = replace(config, model=name, checkpoint=saved.step, compute_dtype=dtype)
    if not is_checkpoint(config.model):
        begun = f", with which the run in {config.run_dir!r} began" if saved else ""
        raise UserError(
            f"option --model is {config.model!r}{begun}: expected a Hugging Face checkpoint directory, "
            "such as a run exports (--checkpoint.export_dir)."
        )
    return config, saved


def _answers(session: Session, requests: Sequence[Request]) -> Iterator[tuple[int, Completion]]:
    """Yields the index of each request with its completion, as it ends."""
    advice = "is the checkpoint intact? --compute_dtype float32 helps where numbers overflow"
    stream = session.stream(requests)
    return sampled(bar(stream, total=len(requests), unit="response"), len(requests), advice)
