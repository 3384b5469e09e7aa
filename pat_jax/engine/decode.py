"""The functions that run on the devices during generation, before compilation.

Each is written for one device's shard and wrapped in `shard_map`, so that every collective in the
compiled program is one that is written here or in the model: two sums a layer, one for the
embedding, one gather of the logits, and once in `check_every` steps the count of live rows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from pat_jax.engine.layout import Layout, ManualPartition
from pat_jax.engine.sampling import sample, uniform
from pat_jax.engine.state import BurstOutput, DecodeState, RowState, Until
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

    def burst(
        self, layout: Layout
    ) -> Callable[[Params, DecodeState, Until], tuple[DecodeState, BurstOutput]]:
        """Decodes until `until`; the state is to be donated."""
        # A spec stands for all arrays below its place in the tree.
        rows: Any = layout.spec("batch")
        cache: Any = layout.spec(*KV_AXES)
        scalar: Any = layout.spec()
        state = DecodeState(rows, cache)
        return jax.shard_map(
            lambda params, state, until: self._burst(layout, params, state, until),
            mesh=layout.mesh,
            in_specs=(layout.param_specs(self.policy), state, scalar),
            out_specs=(state, BurstOutput(rows, rows, rows, scalar)),
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
            vocab_size = self.policy.config.vocab_size
            tokens, logprobs = sample(
                logits, numbers, rows.temperature, rows.top_k, rows.top_p, vocab_size=vocab_size
            )
        output = BurstOutput(
            tokens=jax.lax.dynamic_update_slice(output.tokens, tokens[:, None], (0, output.steps)),
            logprobs=jax.lax.dynamic_update_slice(
                output.logprobs, logprobs[:, None], (0, output.steps)
            ),
            emitted=output.emitted + rows.live,
            steps=output.steps + 1,
        )
        return DecodeState(self._advance(rows, tokens), cache), output

    def _advance(self, rows: RowState, tokens: Int[Array, " rows"]) -> RowState:
        """Rows that are not live stand still: they decode, but nothing reads what they write."""
        position = rows.position + rows.live
        eos = jnp.asarray(self.eos_ids or (-1,), jnp.int32)
        stopped = jnp.any(tokens[:, None] == eos[None, :], axis=1) & ~rows.ignore_eos
        return RowState(
            last_token=jnp.where(rows.live, tokens, rows.last_token),
            position=position,
            end=rows.end,
            live=rows.live & ~stopped & (position + 1 < rows.end),
            ignore_eos=rows.ignore_eos,
            key=rows.key,
            temperature=rows.temperature,
            top_k=rows.top_k,
            top_p=rows.top_p,
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
