"""Loss and gradients of packed examples equal those of transformers (needs the `parity` extra)."""

import numpy as np
import pytest
from supervised_cases import learned, make_examples, packed

from pat_jax.rl.batches.train_batch import MicroBatch

torch = pytest.importorskip("torch", reason="needs the `parity` extra")

from make_reference import build  # noqa: E402 - it imports torch

CASES = ("llama", "llama-tied", "qwen2", "qwen2-tied", "qwen3", "qwen3-tied")


def their_loss(model, micro: MicroBatch, num_tokens: int):
    """By the model's own loss, over the rows as they are packed."""
    starts = micro.positions == 0
    example = starts.cumsum(axis=1)  # each position of padding is one of its own
    sees = example[:, :, None] == example[:, None, :]
    sees &= np.tril(np.ones(sees.shape[1:], bool))
    shifted = np.where(micro.weights > 0, np.roll(micro.tokens, -1, axis=1), -100)
    labels = np.roll(shifted, 1, axis=1)  # they are shifted by the model
    labels[:, 0] = -100
    return model(
        input_ids=torch.from_numpy(micro.tokens).long(),
        position_ids=torch.from_numpy(micro.positions).long(),
        attention_mask=torch.from_numpy(sees)[:, None],
        labels=torch.from_numpy(labels).long(),
        num_items_in_batch=torch.tensor(num_tokens),
        use_cache=False,
    ).loss


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_are_those_of_transformers(tmp_path, case):
    model = build(case).float()
    model.save_pretrained(tmp_path / "model")
    examples = make_examples()
    micro_batches = packed(examples)
    ours = learned(tmp_path / "model", micro_batches, tmp_path)

    num_tokens = sum(int(one.in_loss.sum()) for one in examples)
    losses = [their_loss(model, micro, num_tokens) for micro in micro_batches]
    loss = torch.stack(losses).sum()
    loss.backward()
    theirs = {name: x.grad.numpy() for name, x in model.named_parameters()}

    assert ours.loss == pytest.approx(loss.item(), rel=1e-5)
    assert ours.gradients.keys() == theirs.keys()
    for name, gradient in theirs.items():
        size = np.abs(gradient).max()
        assert size > 1e-4, name
        np.testing.assert_allclose(ours.gradients[name], gradient, atol=1e-4 * size, err_msg=name)
