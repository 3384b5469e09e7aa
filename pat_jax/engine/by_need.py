"""Compiles decode programs during a rollout, if not all were compiled before it.

A burst runs in the smallest compiled bucket that holds it. If there is none, the bucket that fits
best is compiled at once. A larger bucket than needed costs each burst some seconds: their sum is
the rent of the bucket that fits best. Once its rent equals the time of compiling, it is compiled in
the background. This costs at most twice the best choice (Karlin, Manasse, Rudolph, Sleator 1988).
"""

from collections import defaultdict
from concurrent.futures import Future, ThreadPoolExecutor

from pat_jax.layout.buckets import Buckets, Shape
from pat_jax.planning.types import Split
from pat_jax.programs.programs import Key, ProgramTable

MOST_WASTE = 4  # most rows x length of a bucket used instead, over those of the bucket that fits


class ByNeed:
    """Chooses among an engine's compiled decode programs, and compiles more when needed."""

    def __init__(self, programs: ProgramTable, buckets: Buckets):
        self.programs = programs
        self.buckets = buckets
        self._rent: defaultdict[Shape, float] = defaultdict(float)  # rent of each shape in seconds
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="compile-by-need")
        self._job: Future[None] | None = None  # one at a time: a process that ends waits for it

    def has(self, shape: Shape) -> bool:
        """Returns whether the shape's program is compiled.

        Raises:
          Exception: the exception of a compilation in the background that failed.
        """
        if self._job is not None and self._job.done():
            self._job.result()
        return decode_key(shape) in self.programs

    def instead_of(self, fitting: Shape, most_rows: int) -> Shape:
        """Returns the smallest compiled bucket that holds a burst of shape `fitting`. Returns
        `fitting` itself if none is compiled, or only buckets that would waste too much.

        Args:
          most_rows: the most rows that the bucket may have.
        """
        if self.has(fitting):
            return fitting
        larger = [
            shape
            for rows in self.buckets.rows[fitting.split]
            for length in self.buckets.lengths
            if fitting.rows <= rows <= most_rows and fitting.length <= length
            if (shape := fitting._replace(rows=rows, length=length)).area
            <= MOST_WASTE * fitting.area
            if self.has(shape)
        ]
        return min(larger, key=lambda shape: shape.area, default=fitting)

    def rows_below(self, split: Split, rows: int, length: int) -> int:
        """Returns the next smaller row bucket that has a program, or 0 if there is none."""
        smaller = (n for n in self.buckets.rows[split] if n < rows)
        return max((n for n in smaller if self.has(Shape(split, n, length))), default=0)

    def charge(self, shape: Shape, seconds: float) -> None:
        """Adds `seconds`, the estimated time that a burst would have saved in `shape`, to the rent
        of `shape`.

        Starts to compile `shape` once the rent reaches the time that compiling takes.
        """
        if self.has(shape):
            return
        self._rent[shape] += seconds
        is_free = self._job is None or self._job.done()
        # The price is the longest time that a decode program has taken to compile.
        seen = list(self.programs.compile_seconds.items())
        price_s = max((seconds for key, seconds in seen if key.name == "decode"), default=0.0)
        if is_free and self._rent[shape] >= price_s:
            self._job = self._pool.submit(self.programs.compile, decode_key(shape))


def decode_key(shape: Shape) -> Key:
    return Key(
        "decode", shape.split, shape.rows, shape.length, num_draft_tokens=shape.num_draft_tokens
    )
