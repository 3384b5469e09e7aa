"""What a latency model is composed from: the kernels of one layer, timed or estimated. Milliseconds.

`kernel_files.py` reads measurements, `kernel_model.py` computes from coefficients fitted to them.
"""

from typing import Literal, Protocol

from pat_jax.common.chips import Chip

Source = Literal["tables", "coefficients", "chip data", "profile"]
BYTES = 2  # of a bfloat16 number
HEAD_DIM = 128  # of every model whose attention was measured


class Kernels(Protocol):
    """One kind of device and its links. Times are those inside a CUDA graph, or a TPU program."""

    @property
    def chip(self) -> Chip: ...

    @property
    def source(self) -> Source:
        """Where the times are from; every figure that rests on them says so."""
        ...

    @property
    def weight_bytes(self) -> float:
        """Bytes of one number of a weight matrix."""
        ...

    def gemm(self, m: int, n: int, k: int) -> float:
        """Milliseconds of [m, k] times [k, n]."""
        ...

    def head(self, m: int, n: int, k: int) -> float:
        """Milliseconds of the same by the output head, which no weight format quantizes."""
        ...

    def decode_attention(self, rows: int, length: int, heads: int, kv_heads: int) -> float:
        """Milliseconds of one layer, `rows` sequences of `length` tokens, with the heads of one device."""
        ...

    def prefill_attention(self, rows: int, length: int, heads: int, kv_heads: int) -> float:
        """Milliseconds of one layer, `rows` prompts of `length` tokens each."""
        ...

    def elementwise(self, num_bytes: float) -> float:
        """Milliseconds of one fused kernel that reads and writes so many bytes: a norm, an activation."""
        ...

    def all_reduce(self, devices: int, elements: int) -> float:
        """Milliseconds of summing `elements` bfloat16 numbers over the devices of a replica."""
        ...

    def all_gather(self, devices: int, elements: int) -> float:
        """Milliseconds of gathering `elements` bfloat16 numbers, of which each device has its share."""
        ...

    def exchange_bytes_s(self, devices: int) -> float:
        """Bytes a second, one way, that a device sends to others of a block of `devices`."""
        ...
