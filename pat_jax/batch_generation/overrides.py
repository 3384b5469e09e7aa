"""Sampling options that a line of a prompts file, the command or the checkpoint may leave unset."""

from dataclasses import dataclass, fields, replace
from typing import Any

from pat_jax.common.errors import shown
from pat_jax.common.json_text import has_lone_surrogate
from pat_jax.engine.sequences.sampling import MAX_STOP_IDS, Sampling

MOST_SAMPLES = 2**16  # the most samples of one line


@dataclass(frozen=True)
class SamplingOverrides:
    """Sampling options by the names that lines of a prompts file use; None if one is not given."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    stop: str | list[str] | None = None
    logprobs: int | None = None
    n: int | None = None
    seed: int | None = None

    def over(self, other: "SamplingOverrides") -> "SamplingOverrides":
        """Returns these options, and for each that is None the one of `other`."""
        return replace(other, **_given(self))

    @property
    def sampling(self) -> Sampling:
        """The engine's sampling options. Raises ValueError with one sentence that names the invalid
        field."""
        given = {name: value for name, value in _given(self).items() if name in _SAMPLING}
        if isinstance(stops := self.stop_token_ids, list):
            if len(stops) > MAX_STOP_IDS:
                raise ValueError(
                    f"stop_token_ids has {len(stops)} entries: expected up to {MAX_STOP_IDS}."
                )
            given["stop_token_ids"] = tuple(stops)
        return Sampling(**given)

    @property
    def stops(self) -> tuple[str, ...]:
        if self.stop is None or self.stop == "":
            return ()
        stops = [self.stop] if isinstance(self.stop, str) else self.stop
        if not isinstance(stops, list) or not all(isinstance(s, str) and s for s in stops):
            raise ValueError(f"stop is {shown(self.stop)}: expected text or a list of texts.")
        if has_lone_surrogate(stops):
            raise ValueError(f"stop is {shown(self.stop)}: expected whole characters.")
        return tuple(stops)

    def check(self) -> None:
        """Raises ValueError if a field is invalid: one sentence that begins with its name."""
        _ = self.sampling, self.stops
        self.count("n", 1, 1, MOST_SAMPLES)
        self.count("max_tokens", 1, 1)

    def count(self, name: str, default: int, least: int, most: int = 2**63 - 1) -> int:
        value = getattr(self, name)
        if value is None:
            return default
        if type(value) is not int or not least <= value <= most:
            raise ValueError(
                f"{name} is {shown(value)}: expected an integer from {least} to {most:,}."
            )
        return value


_SAMPLING = {field.name for field in fields(Sampling)}


def _given(overrides: SamplingOverrides) -> dict[str, Any]:
    values = {field.name: getattr(overrides, field.name) for field in fields(overrides)}
    return {name: value for name, value in values.items() if value is not None}
