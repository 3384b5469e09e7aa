"""A reward computed by a model on the run's own devices.

Responses are tokenized when they end, and then wait for the model. If the model has devices of its
own, a thread scores waiting responses while others are generated. Else the model runs after the
rollout, since two threads must not dispatch programs to the same devices. Knows texts and tokens.
The model is a function that is passed in. Imports no jax.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import KW_ONLY, dataclass, field
from functools import partial

import numpy as np
from jaxtyping import Float, Int

from pat_jax.common.gathering import Gathering, is_any
from pat_jax.rl.rewards.outcome import Cause, Failure, Outcome, read_score
from pat_jax.rl.rewards.responses import Response
from pat_jax.rl.rewards.shares import Alone, Shares
from pat_jax.rl.text.chat_template import ChatTemplateError
from pat_jax.rl.text.scored_text import scored_tokens, until_padding
from pat_jax.rl.text.tokenizer import HuggingFaceTokenizer

# A function from the tokens of texts to the model's score of each text.
Score = Callable[[Sequence[Int[np.ndarray, " _"]]], Float[np.ndarray, " texts"]]

_Tokens = bytes  # an int32 array's bytes: small, comparable, and usable as a key


@dataclass(frozen=True)
class _Waiting:
    texts: Sequence[_Tokens | Failure]  # one per response
    outcome: Future[Outcome]


@dataclass(eq=False)
class RewardModel:
    """Scores responses with a model, by its own tokenizer and chat template."""

    name: str  # the reward's name in metrics
    tokenizer: HuggingFaceTokenizer
    score: Score
    _: KW_ONLY
    max_length: int  # most tokens of a text; a longer text gets no score
    # The checkpoint's `pad_token_id`. As in transformers, the score is read at the last token that
    # is not padding; if it is None, at the last token.
    pad_id: int | None = None
    # Whether texts of given lengths fill a batch; until they do, they wait for more texts.
    fills: Callable[[Sequence[int]], bool] = is_any
    _waiting: list[_Waiting] = field(default_factory=list)
    _gathering: Gathering[_Waiting] | None = None

    def score_on(self, thread: Executor | None) -> None:
        """Sets the thread that scores responses during a rollout, from now on.

        Args:
          thread: thread that runs programs on the model's devices, or None if these devices are
            busy during a rollout, so that responses wait for `score_waiting`.
        """
        self._gathering = None
        if thread is not None:
            score = partial(self._score_all, Alone())
            self._gathering = Gathering(thread, score, self._fill)

    def submit(self, responses: Sequence[Response], seconds: float) -> Future[Outcome]:
        """Tokenizes the responses, which the thread of `score_on` or `score_waiting` then scores.
        Call it on one thread only.

        A program of fixed shapes needs no time limit, so `seconds` has no effect.
        """
        del seconds
        waiting = _Waiting([self._read(one) for one in responses], Future())
        failures = [one for one in waiting.texts if isinstance(one, Failure)]
        if len(failures) == len(waiting.texts):  # there is nothing to score
            waiting.outcome.set_result(Outcome(scores=failures))
        elif (gathering := self._gathering) is None:
            self._waiting.append(waiting)
        else:
            gathering.add(waiting)
        return waiting.outcome

    def try_out(self, responses: Sequence[Response]) -> Outcome:
        """Returns an outcome with a failure for each response that cannot be scored and 0 for the
        others. The model does not run."""
        found = [self._read(response) for response in responses]
        return Outcome(scores=[one if isinstance(one, Failure) else 0.0 for one in found])

    def ask(self) -> None:
        """Lets the thread score the texts that wait for a full batch, and returns at once."""
        if self._gathering is not None:
            self._gathering.ask()

    def score_waiting(self, shares: Shares) -> None:
        """Scores all waiting responses, in all processes together. Each process must call it.

        Batches depend only on the set of texts, so they are the same in every process and for any
        order in which responses ended. Equal texts are scored once.
        """
        if self._gathering is not None:
            self._gathering.wait()
            return
        waiting = self._waiting
        self._waiting = []
        self._score_all(shares, waiting)

    def _score_all(self, shares: Shares, waiting: Sequence[_Waiting]) -> None:
        own = {one for each in waiting for one in each.texts if isinstance(one, _Tokens)}
        every = sorted(set().union(*shares.gather(f"texts for {self.name}", own)))
        try:
            scores = self.score([np.frombuffer(one, np.int32) for one in every]) if every else ()
        except BaseException as error:
            for each in waiting:
                each.outcome.set_exception(error)
            raise
        by_text = dict(zip(every, map(read_score, map(float, scores)), strict=True))
        for each in waiting:
            found = [one if isinstance(one, Failure) else by_text[one] for one in each.texts]
            each.outcome.set_result(Outcome(scores=found))

    def close(self) -> None:
        """Drops the responses that wait."""
        self._waiting = []

    def _fill(self, waiting: Sequence[_Waiting]) -> bool:
        texts = {one for each in waiting for one in each.texts if isinstance(one, _Tokens)}
        return self.fills([len(one) // np.dtype(np.int32).itemsize for one in texts])

    def _read(self, response: Response) -> _Tokens | Failure:
        prompt = response.messages or response.prompt
        try:
            tokens = np.array(scored_tokens(self.tokenizer, prompt, response.completion), np.int32)
        except ChatTemplateError as error:
            return Failure(Cause.EXCEPTION, f"cannot read it: {error}".removesuffix("."))
        if len(tokens) > self.max_length:
            return Failure(
                Cause.TOO_LONG,
                f"reads texts of up to {self.max_length:,} tokens (--reward_model.max_length), and "
                f"this one has {len(tokens):,}",
            )
        return until_padding(tokens, self.pad_id).tobytes()
