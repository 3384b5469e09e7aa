"""SmolLM2-135M-Instruct generates what it generates in transformers, in every layout and with drafts."""

from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pat_jax
from pat_jax.batch_generation.answers import Answer
from pat_jax.models.checkpoints.hf_export import export
from pat_jax.models.checkpoints.hf_load import check_checkpoint, load_params
from pat_jax.models.checkpoints.peft_adapter import export_adapter, load_adapter, read_adapter
from pat_jax.models.lora import Lora
from pat_jax.models.policy import Params, Policy

torch = pytest.importorskip("torch", reason="needs the `parity` extra")
peft = pytest.importorskip("peft", reason="needs the `parity` extra")

from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel  # noqa: E402

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(1500),
    # PEFT 0.21 asks transformers 5 under its old name.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
]
NEW_TOKENS = 33
NEAR_TIE = 1e-3  # of two logits, in nats
TEXTS = (
    "The capital of France is",
    "1, 2, 3, 4, 5,",
    "def add(a, b):\n    return",
    "Once upon a time, in a small village,",
    "Water boils at",
    "import numpy as np\n\ndef mean(x):\n",
)
QUESTIONS = (
    "What is 3 + 4?",
    "Name three colours.",
    "Who wrote Hamlet?",
    "Translate 'good morning' into French.",
    "Why is the sky blue?",
    "List the days of the week.",
)


@pytest.fixture(scope="module")
def theirs(smollm2: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def prompts(smollm2: Path) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    chats = [[{"role": "user", "content": text}] for text in QUESTIONS]
    return [tokenizer.encode(text) for text in TEXTS] + [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        for chat in chats
    ]


@pytest.fixture(scope="module")
def expected(theirs: PreTrainedModel, prompts: list[list[int]]) -> list[np.ndarray]:
    """What transformers generates greedily, int[new] of each prompt."""

    def generate(prompt: list[int]) -> np.ndarray:
        tokens = torch.tensor([prompt])
        found = theirs.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
        )
        return found[0, len(prompt) :].numpy()

    return [generate(prompt) for prompt in prompts]


def their_logprobs(model: PreTrainedModel, prompt: list[int], new: np.ndarray) -> np.ndarray:
    """float32[new, vocab], in nats."""
    tokens = torch.tensor([[*prompt, *new.tolist()]])
    with torch.no_grad():
        logits = model(input_ids=tokens, use_cache=False).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits, -1).numpy()


def check_same(
    answers: list[Answer],
    expected: list[np.ndarray],
    prompts: list[list[int]],
    theirs: PreTrainedModel,
) -> int:
    """Tokens that are the same; the first that differs in a response has to be a near-tie."""
    same = 0
    for answer, wanted, prompt in zip(answers, expected, prompts, strict=True):
        found = np.asarray(answer.token_ids)
        length = min(len(found), len(wanted))
        differs = np.flatnonzero(found[:length] != wanted[:length])
        if len(differs) == 0:
            assert len(found) == len(wanted)
            same += length
            continue
        first = int(differs[0])
        scores = their_logprobs(theirs, prompt, wanted[: first + 1])[first]
        assert scores[wanted[first]] - scores[found[first]] < NEAR_TIE
        same += first
    return same


def generate(model: Path, prompts: list[list[int]], **options) -> tuple[list[Answer], object]:
    session = pat_jax.session(model=str(model), batch=12, max_length=96, **options)
    answers = session.generate(prompts, temperature=0, max_tokens=NEW_TOKENS, logprobs=0)
    return [one for (one,) in answers], session.rollout


@pytest.fixture(scope="module")
def on_one_device(smollm2: Path, prompts: list[list[int]]) -> list[Answer]:
    options = {"devices": 1, "speculation": {"source": "none"}}
    return generate(smollm2, prompts, layout="dp1tp1", **options)[0]


def test_greedy_tokens_and_logprobs_are_those_of_transformers(
    on_one_device, expected, prompts, theirs
):
    total = sum(map(len, expected))
    same = check_same(on_one_device, expected, prompts, theirs)
    print(f"{same} of {total} tokens are those of transformers")
    assert total > 300 and same >= 0.98 * total
    for answer, prompt in zip(on_one_device, prompts, strict=True):
        new = np.asarray(answer.token_ids)
        scores = their_logprobs(theirs, prompt, new)[np.arange(len(new)), new]
        ours = [entry["logprob"] for entry in answer.logprobs or ()]
        np.testing.assert_allclose(ours, scores, atol=5e-4, rtol=0)


@pytest.mark.parametrize("layout", [pytest.param("dp3tp1", marks=pytest.mark.slow), "dp1tp3"])
def test_three_devices_and_drafts_change_no_token(
    smollm2, layout, on_one_device, expected, prompts, theirs
):
    """9 query and 3 key-value heads split over 3 devices; drafts copied from the responses themselves."""
    options = {"devices": 3, "speculation": {"source": "suffix", "num_draft_tokens": [3]}}
    answers, rollout = generate(smollm2, prompts, layout=layout, **options)
    same = check_same(answers, expected, prompts, theirs)
    print(f"{layout}: {same} tokens the same, drafts {sum(rollout.drafts.drafted)} proposed")
    assert same >= 0.98 * sum(map(len, expected))
    assert [a.token_ids for a in answers] == [a.token_ids for a in on_one_device]


TOKENS = np.random.default_rng(0).integers(0, 49152, (2, 40))


def our_logits(policy: Policy, params: Params) -> np.ndarray:
    positions = jnp.broadcast_to(jnp.arange(TOKENS.shape[1]), TOKENS.shape)

    @jax.jit
    def compute(params: Params) -> jax.Array:
        model = policy.bind(params)
        return model.logits(model(TOKENS, positions)[0])

    return np.asarray(compute(params))[..., : policy.config.vocab_size]


def logits_of(model: PreTrainedModel) -> np.ndarray:
    with torch.no_grad():
        return model(input_ids=torch.from_numpy(TOKENS), use_cache=False).logits.numpy()


@pytest.fixture(scope="module")
def ours(smollm2: Path) -> Iterator[tuple[Policy, Params]]:
    policy = Policy.from_config(check_checkpoint(smollm2))
    yield policy, load_params(smollm2, policy, None, jnp.float32)


def test_an_export_gives_the_same_logits_in_transformers(smollm2, ours, theirs, tmp_path):
    policy, params = ours
    export(tmp_path / "out", policy, params, jnp.float32, smollm2)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    np.testing.assert_array_equal(logits_of(again), logits_of(theirs))
    np.testing.assert_allclose(our_logits(policy, params), logits_of(theirs), atol=2e-3, rtol=0)


def test_adapters_go_to_peft_and_come_back(smollm2, ours, tmp_path):
    policy, params = ours
    lora, rng = Lora.of(policy, rank=4, alpha=8.0, targets=["all-linear"]), np.random.default_rng(1)
    learned = jax.tree.map(
        lambda x: jnp.asarray(rng.normal(0, 0.02, x.shape), jnp.float32), lora.abstract_params
    )
    export_adapter(tmp_path / "adapter", lora, learned, smollm2)
    base = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    before = logits_of(base)
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    expected = logits_of(adapted)
    assert np.abs(expected - before).max() > 0.1
    found = our_logits(policy, lora.attach(params, learned))
    np.testing.assert_allclose(found, expected, atol=5e-3, rtol=0)
    adapted.save_pretrained(tmp_path / "again")
    back = load_adapter(tmp_path / "again", read_adapter(tmp_path / "again", policy))
    for one, other in zip(jax.tree.leaves(back), jax.tree.leaves(learned), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
