"""The functions that run on the devices during generation, before compilation.

Each is written for one device's shard and wrapped in `shard_map`, so that every collective in the
compiled program is one that is written here or in the model: two sums a layer, one for the
embedding, one gather of the logits, and once in `check_every` steps the count of live rows.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from pat_jax.engine.layout import Layout, ManualPartition
from pat_jax.engine.sampling import likeliest, remember, sample, uniform
from pat_jax.engine.state import BurstOutput, DecodeState, RowState, Until
from pat_jax.engine.types import NO_TOKEN
from pat_jax.models.kv_cache import KV_AXES, KVCache
from pat_jax.models.policy import Params, Policy


@dataclass(frozen=True)
class DecodeFunctions:
    """Builds the programs of one policy; knows nothing about when they run."""

    policy: Policy
    dtype: jnp.dtype
    eos_ids: tuple[int, ...]
    check_every: int
    burst_steps: int
    max_logprobs: int = 0  # likeliest tokens that a request may ask for

    def burst(
        self, layout: Layout
    ) -> Callable[[Params, DecodeState, Until], tuple[DecodeState, BurstOutput]]:
        """Decodes until `until`; the state is to be donated."""
        # A spec stands for all arrays below its place in the tree.
        rows: Any = layout.spec("batch")
        cache: Any = layout.spec(*KV_AXES)
        scalar: Any = layout.spec()
        state = DecodeState(rows, rows, cache)
        return jax.shard_map(
            lambda params, state, until: self._burst(layout, params, state, until),
            mesh=layout.mesh,
            in_specs=(layout.param_specs(self.policy), state, scalar),
            out_specs=(state, BurstOutput(rows, rows, rows, scalar, rows, rows)),
            check_vma=False,
        )

    def prefill(self, layout: Layout) -> Callable[[Params, KVCache, Array, Array], KVCache]:
        """Writes a chunk of known tokens into the cache: `tokens[rows, chunk]` from column `start`."""
        spec = layout.spec(*KV_AXES)

        def run(params: Params, cache: KVCache, tokens: Array, start: Int[Array, ""]) -> KVCache:
            positions = jnp.broadcast_to(start + jnp.arange(tokens.shape[1])[None, :], tokens.shape)
            model, partition = self.policy.bind(params), ManualPartition(layout)
            _, written = model(tokens, positions, cache, partition=partition, dtype=self.dtype)
            assert written is not None  # a cache went in
            return written

        return jax.shard_map(
            run,
            mesh=layout.mesh,
            in_specs=(layout.param_specs(self.policy), spec, layout.spec("batch"), layout.spec()),
            out_specs=spec,
            check_vma=False,
        )

    def _burst(
        self, layout: Layout, params: Params, state: DecodeState, until: Until
    ) -> tuple[DecodeState, BurstOutput]:
        rows = state.rows.position.shape[0]
        output = BurstOutput(
            tokens=jnp.zeros((rows, self.burst_steps), jnp.int32),
            logprobs=jnp.zeros((rows, self.burst_steps), jnp.float32),
            emitted=jnp.zeros(rows, jnp.int32),
            steps=jnp.int32(0),
            top_tokens=jnp.zeros((rows, self.burst_steps, self.max_logprobs), jnp.int32),
            top_logprobs=jnp.zeros((rows, self.burst_steps, self.max_logprobs), jnp.float32),
        )

        def fullest_group(live: Bool[Array, " rows"]) -> Int[Array, ""]:
            count = jnp.sum(live, dtype=jnp.int32)
            return jax.lax.pmax(count, layout.dp_axes) if layout.dp_axes else count

        def keep_going(carry: tuple[DecodeState, BurstOutput, Array]) -> Array:
            _, output, live = carry
            return (live > until.threshold) & (output.steps < until.steps)

        def several_steps(carry: tuple[DecodeState, BurstOutput, Array]) -> tuple:
            # A fixed trip count: only this outer loop has a condition for the host side to wait on.
            state, output = jax.lax.fori_loop(
                0, self.check_every, lambda _, c: self._step(layout, params, *c), carry[:2]
            )
            return state, output, fullest_group(state.rows.live)

        carry = (state, output, fullest_group(state.rows.live))
        state, output, _ = jax.lax.while_loop(keep_going, several_steps, carry)
        return state, output

    def _step(
        self, layout: Layout, params: Params, state: DecodeState, output: BurstOutput
    ) -> tuple[DecodeState, BurstOutput]:
        rows = state.rows
        model, partition = self.policy.bind(params), ManualPartition(layout)
        hidden, cache = model(
            rows.last_token[:, None],
            rows.position[:, None],
            state.cache,
            partition=partition,
            dtype=self.dtype,
        )
        assert cache is not None  # a cache went in
        logits = model.logits(hidden[:, 0], partition)
        with jax.named_scope("sample"):
            numbers = uniform(rows.key, rows.position + 1)
            vocab_size, endings = self.policy.config.vocab_size, self._endings(rows)
            may_end = rows.position + 1 >= rows.sampling.may_end_at
            forbidden = jnp.where(may_end[:, None], NO_TOKEN, endings)
            tokens, logprobs = sample(
                logits, numbers, rows.sampling, state.seen, forbidden, vocab_size=vocab_size
            )
            top_tokens, top_logprobs = likeliest(
                logits, rows.sampling.wants_top, count=self.max_logprobs, vocab_size=vocab_size
            )
        # A log-probability that is no number has come from such logits: nothing good would follow.
        stopped = jnp.any(tokens[:, None] == endings, axis=1) | jnp.isnan(logprobs)
        output = BurstOutput(
            tokens=_put_column(output.tokens, tokens, output.steps),
            logprobs=_put_column(output.logprobs, logprobs, output.steps),
            emitted=output.emitted + rows.live,
            steps=output.steps + 1,
            top_tokens=_put_column(output.top_tokens, top_tokens, output.steps),
            top_logprobs=_put_column(output.top_logprobs, top_logprobs, output.steps),
        )
        seen = remember(state.seen, tokens, rows.live)
        return DecodeState(_advance(rows, tokens, stopped), seen, cache), output

    def _endings(self, rows: RowState) -> Int[Array, "rows endings"]:
        """The tokens that end each row's response, NO_TOKEN where there are fewer."""
        eos = jnp.asarray(self.eos_ids, jnp.int32)[None, :]
        eos = jnp.where(rows.ignore_eos[:, None], NO_TOKEN, eos)
        return jnp.concatenate([eos, rows.sampling.stop_ids], axis=1)


def _put_column(buffer: Any, column: Array, at: Any) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(buffer, column[:, None], at, axis=1)


def _advance(
    rows: RowState, tokens: Int[Array, " rows"], stopped: Bool[Array, " rows"]
) -> RowState:
    """Rows that are not live stand still: they decode, but nothing reads what they write."""
    position = rows.position + rows.live
    return replace(
        rows,
        last_token=jnp.where(rows.live, tokens, rows.last_token),
        position=position,
        live=rows.live & ~stopped & (position + 1 < rows.end),
    )


def insert_rows(layout: Layout) -> Callable[[KVCache, KVCache, Array], KVCache]:
    """Copies the rows of a prefilled cache into chosen rows of the decode cache, group by group.

    `rows[i]` is the row within its group that row i goes to; one past the end drops it. The decode
    cache is to be donated.
    """

    def run(cache: KVCache, prefilled: KVCache, rows: Int[Array, " prefill_rows"]) -> KVCache:
        return jax.tree.map(lambda to, new: to.at[rows].set(new, mode="drop"), cache, prefilled)

    return _on_cache(layout, run, num_caches=2)


def resize(layout: Layout, length: int) -> Callable[[KVCache, Array], KVCache]:
    """Picks rows of each group into a cache of another row bucket, and of another `length`.

    Compaction and growth are this one local copy: no device talks to another.
    """

    def run(cache: KVCache, rows: Int[Array, " new_rows"]) -> KVCache:
        def pick(x: Array) -> Array:
            kept = jnp.take(x[:, :, :length], rows, axis=0)
            return jnp.pad(kept, ((0, 0), (0, 0), (0, length - kept.shape[2]), (0, 0)))

        return jax.tree.map(pick, cache)

    return _on_cache(layout, run, num_caches=1)


def _on_cache(layout: Layout, run: Callable, *, num_caches: int) -> Callable:
    cache = layout.spec(*KV_AXES)
    specs = (cache,) * num_caches + (layout.spec("batch"),)
    return jax.shard_map(run, mesh=layout.mesh, in_specs=specs, out_specs=cache, check_vma=False)
