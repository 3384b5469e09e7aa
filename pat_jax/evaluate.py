"""`python -m pat_jax.evaluate`: pass@k and mean reward of a model on files of problems, with intervals.

All samples of all files go through one session of the engine; `run/evaluation.py`, which evaluates in
training too, scores each from the moment it ends.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path

from tqdm import tqdm

from pat_jax.common.devices import configure
from pat_jax.common.errors import UserError
from pat_jax.config.command_line import parse, run_command
from pat_jax.engine.sequences.responses import Completion, Request
from pat_jax.engine.session import Session
from pat_jax.evaluation.config import EvaluateConfig
from pat_jax.evaluation.exam import load_exam
from pat_jax.evaluation.results import ResultFolder, check_folder
from pat_jax.rl.responses import response_reader
from pat_jax.rl.tokenizer import HuggingFaceTokenizer, check_vocabulary
from pat_jax.run.completions import Completions
from pat_jax.run.evaluation import Evaluator
from pat_jax.run.generation import sampled
from pat_jax.run.progress import Progress
from pat_jax.run.scoring import open_scorer, try_out
from pat_jax.run.session import load_weights, open_session
from pat_jax.run.setup import build_engine, find_profile, model_config, profile_subject


def main() -> None:
    config = parse(sys.argv[1:], EvaluateConfig, prog="python -m pat_jax.evaluate", presets=None)
    config.check_given()
    if not config.out:
        config = replace(config, out=f"evaluations/{datetime.now():%Y%m%d-%H%M%S}")
    check_folder(config.out)
    if not Path(config.model).is_dir():
        raise UserError(
            f"option --model is {config.model!r}: expected a Hugging Face checkpoint directory."
        )
    devices = configure(config.devices)
    model = model_config(config.model_options, len(devices))
    run = config.run_config(model, len(devices))
    tokenizer = HuggingFaceTokenizer(config.model, run.data.chat)
    check_vocabulary(tokenizer, model.vocab_size, source=config.model)
    exam = load_exam(run, tokenizer)
    engine = build_engine(run, model, devices)
    profile = find_profile(run, profile_subject(run, model, devices))
    progress = Progress(0)
    with open_scorer(run, exam.rewards) as scorer:
        first = exam.sets[0].prompts[0]
        try_out(scorer, first, exam.columns, config.num_generations, progress)
        folder = ResultFolder(config)
        for line in exam.notes:
            progress.print(line)
        weights_in = partial(load_weights, run, engine.dtype, engine.policy)
        session = open_session(run, engine, profile, weights_in)
        with Completions(tokenizer, folder.path, is_asked=True) as completions:
            read = response_reader(exam.columns, tokenizer)
            evaluator = Evaluator(run, exam.sets, read, scorer, completions, progress)
            found = evaluator.evaluate(None, partial(_answers, session))
    progress.close()
    for line in found.samples:
        print(line)
    print(folder.write(found, exam.left_out))


def _answers(session: Session, requests: Sequence[Request]) -> Iterator[tuple[int, Completion]]:
    """As the responses end."""
    advice = "is the checkpoint intact? --compute_dtype float32 helps where numbers overflow"
    stream = session.stream(requests)
    bar = tqdm(stream, total=len(requests), unit="response", disable=None, dynamic_ncols=True)
    return sampled(bar, len(requests), advice)


if __name__ == "__main__":
    run_command(main)
