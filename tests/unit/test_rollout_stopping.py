"""Stop rules: the window must find what the whole text contains, at the first token that completes it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from services.rollout.stopping import StopRule, StopStrings
from shared.wire.types import FinishReason, SamplingParams

TEXTS = ["a", "b", "ab", " ", "\n", "END", "EN", "D", "é", "😀", "x" * 9, "日本"]


def byte_level() -> Tokenizer:
    """Tokens of one byte and of whole words, as GPT-2, Llama-3 and Qwen have them."""
    alphabet = {printable: byte for byte, printable in sorted(bytes_to_unicode().items())}
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for text in TEXTS:
        ((piece, _),) = spell.pre_tokenize_str(text)
        alphabet.setdefault(piece, len(alphabet))
    tokenizer = Tokenizer(models.WordLevel(alphabet, unk_token="a"))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Words that carry their space in front, single bytes for the rest: Llama-2, Mistral."""
    words = ["▁a", "▁b", "a", "b", "▁", "END", "▁EN", "D", "é", "x" * 9] + [f"<0x{b:02X}>" for b in range(256)]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="a"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def bytes_to_unicode() -> dict[int, str]:
    """GPT-2's printable spelling of the bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spelling = {b: chr(b) for b in printable}
    for n, b in enumerate(b for b in range(256) if b not in printable):
        spelling[b] = chr(256 + n)
    return spelling


TOKENIZERS = {"byte_level": byte_level(), "byte_fallback": byte_fallback()}


def first_match(decode, stop, tokens):
    """The definition: the number of tokens after which the whole text contains a stop string, or None."""
    for n in range(1, len(tokens) + 1):
        text = decode(tokens[:n])
        if any(s in text for s in stop):
            return n
    return None


def windowed_match(decode, stop, tokens, *, begin=1):
    strings = StopStrings(stop, decode)
    for n in range(begin, len(tokens) + 1):
        if strings.found([7, 7, *tokens[:n]], 2):
            return n
    return None


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(data=st.data())
def test_the_window_finds_what_the_whole_text_contains(kind, data):
    tokenizer = TOKENIZERS[kind]
    frequent = [tokenizer.token_to_id(t) for t in tokenizer.get_vocab() if len(t) != 6 or not t.startswith("<0x")]
    emoji = [tokenizer.token_to_id(f"<0x{b:02X}>") for b in "😀é".encode()] if kind == "byte_fallback" else [240, 159]
    token = st.sampled_from(frequent) | st.sampled_from(emoji) | st.integers(0, tokenizer.get_vocab_size() - 1)
    tokens = data.draw(st.lists(token, min_size=1, max_size=120))
    stop = tuple(
        data.draw(
            st.lists(st.sampled_from(["END", " a", "ab", "bEND", "😀", "é\n", "xx", "日"]), min_size=1, max_size=2)
        )
    )

    def decode(ids):
        return tokenizer.decode(list(ids), skip_special_tokens=False)

    assert windowed_match(decode, stop, tokens) == first_match(decode, stop, tokens)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_match_far_behind_the_start_is_found_and_the_window_stays_short(kind):
    tokenizer = TOKENIZERS[kind]
    seen = []

    def decode(ids):
        seen.append(len(ids))
        return tokenizer.decode(list(ids), skip_special_tokens=False)

    ids = [tokenizer.token_to_id(t) for t in ("a", "b", "D")]
    en = tokenizer.token_to_id("EN" if kind == "byte_level" else "▁EN")
    tokens = ids[:2] * 1000 + [en, ids[2]]
    assert windowed_match(decode, ("END",), tokens) == len(tokens)
    assert max(seen[:-1]) < 40
    assert seen[-1] == len(tokens), "a match in the window is confirmed in the whole text"


def test_a_window_never_begins_inside_a_character():
    """Byte tokens in a row are decoded together: cut inside a character, none of them would ever be text again."""
    tokenizer = TOKENIZERS["byte_fallback"]
    tokens = [tokenizer.token_to_id(f"<0x{b:02X}>") for b in ("😀" * 30 + "é").encode()]

    def decode(ids):
        return tokenizer.decode(list(ids), skip_special_tokens=False)

    assert windowed_match(decode, ("😀é",), tokens) == first_match(decode, ("😀é",), tokens) == len(tokens)


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(data=st.data())
def test_a_continuation_rebuilds_the_state(kind, data):
    tokenizer = TOKENIZERS[kind]
    tokens = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), min_size=2, max_size=60))
    stop = ("END", "ab")

    def decode(ids):
        return tokenizer.decode(list(ids), skip_special_tokens=False)

    expected = first_match(decode, stop, tokens)
    split = data.draw(st.integers(1, (expected or len(tokens))))
    assert windowed_match(decode, stop, tokens, begin=split) == expected


def rule(*, decode=None, **params):
    return StopRule(SamplingParams(**params), decode)


def test_any_of_several_stop_ids_ends_a_sample_but_not_one_of_the_prompt():
    stop = rule(stop_token_ids=(3, 4), max_tokens=9)
    assert stop.check([4], 1) is None
    assert stop.check([4, 1], 1) is None
    assert stop.check([4, 1, 3], 1) is FinishReason.STOP


def test_length_counts_sampled_tokens_and_a_stop_at_the_limit_is_a_stop():
    stop = rule(stop_token_ids=(3,), max_tokens=2)
    assert stop.check([9, 9, 1], 2) is None
    assert stop.check([9, 9, 1, 1], 2) is FinishReason.LENGTH
    assert stop.check([9, 9, 1, 3], 2) is FinishReason.STOP


def test_a_stop_string_that_only_the_prompt_contains_does_not_count():
    stop = rule(stop=("ab",), max_tokens=9, decode=lambda ids: "".join("ab"[i] for i in ids))
    assert stop.check([0, 1], 2) is None
    assert stop.check([0, 1, 1], 2) is None
    assert stop.check([0, 1, 1, 0], 2) is None
    assert stop.check([0, 1, 1, 0, 1], 2) is FinishReason.STOP
