"""When a sample ends: stop ids, stop strings, length. A function of its sampled tokens alone, so any replica agrees."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shared.wire.types import FinishReason, SamplingParams

Decode = Callable[[Sequence[int]], str]
"""Token ids to text, special tokens spelled out."""

REPLACEMENT = "\ufffd"
"""What a decoder writes for bytes that are no whole character (yet)."""

MARGIN = 8
"""Characters at the start of a window that may differ from the whole text: a stripped space, a cut character."""


class StopRule:
    """Decides after each sampled token. One per sample; without stop strings it keeps nothing, and samples may share it.

    Args:
        params: of the request.
        decode: needed where params.stop is not empty.
    """

    def __init__(self, params: SamplingParams, decode: Decode | None = None) -> None:
        self._max_tokens = params.max_tokens
        self.stop_ids = frozenset(params.stop_token_ids)
        self._strings: StopStrings | None = None
        if params.stop:
            assert decode is not None
            self._strings = StopStrings(params.stop, decode)

    @property
    def has_strings(self) -> bool:
        """Whether every token has to be shown to `check`; otherwise only one of `stop_ids` and the last can end the sample."""
        return self._strings is not None

    def check(self, token_ids: Sequence[int], num_prompt_tokens: int) -> FinishReason | None:
        """After the last of `token_ids`; with stop strings call it at every token, or once for a continuation's tokens.

        Args:
            token_ids: prompt and sampled tokens.
        """
        num_sampled = len(token_ids) - num_prompt_tokens
        if num_sampled == 0:
            return None
        if token_ids[-1] in self.stop_ids:
            return FinishReason.STOP
        if self._strings is not None and self._strings.found(token_ids, num_prompt_tokens):
            return FinishReason.STOP
        return FinishReason.LENGTH if num_sampled >= self._max_tokens else None


class StopStrings:
    """Finds stop strings in growing text while decoding only a window at its end.

    A new occurrence overlaps the characters that the last token changed. So a window that keeps more characters before
    them than the longest stop string has, and does not begin inside a character, misses none; one that it finds is
    confirmed in the whole text.
    """

    def __init__(self, stop: Sequence[str], decode: Decode) -> None:
        self._stop, self._decode = tuple(stop), decode
        self._reach = max(map(len, stop)) + MARGIN
        self._skipped = 0
        """Sampled tokens before the window."""

    def found(self, token_ids: Sequence[int], num_prompt_tokens: int) -> bool:
        """Whether the text of `token_ids[num_prompt_tokens:]` contains a stop string, given that it did not before."""
        text = self._decode(token_ids[num_prompt_tokens + self._skipped :])
        if self._occurs(text) and (not self._skipped or self._occurs(self._decode(token_ids[num_prompt_tokens:]))):
            return True
        num_sampled = len(token_ids) - num_prompt_tokens
        if num_sampled - self._skipped >= 2 * self._reach:
            tail = self._decode(token_ids[-self._reach :])
            if len(tail) >= self._reach and not tail.startswith(REPLACEMENT):
                self._skipped = num_sampled - self._reach
        return False

    def _occurs(self, text: str) -> bool:
        return any(s in text for s in self._stop)
