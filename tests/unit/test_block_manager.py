"""The page pool: no page is lost, shared pages are equal from the first token on, and the oldest goes first."""

import ast
from array import array
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.rollout import kv_cache
from services.rollout.kv_cache import PagePool
from services.rollout.sequence import Sequence

LIGHT_MODULES = ("sequence", "kv_cache", "stopping", "config")


def sequence(tokens, arrival=0, **kwargs):
    return Sequence(arrival=arrival, token_ids=array("i", tokens), **kwargs)


def admitted(pool, tokens, arrival=0):
    seq = sequence(tokens, arrival)
    assert pool.allocate(seq, pool.lookup(seq))
    return seq


def computed(pool, tokens, arrival=0):
    seq = admitted(pool, tokens, arrival)
    pool.advance(seq, len(seq.token_ids))
    return seq


@pytest.mark.parametrize("page_size", [0, 3, 12, -4])
def test_a_page_size_that_is_no_power_of_two_is_refused(page_size):
    with pytest.raises(ValueError, match="page_size must be a power of two"):
        PagePool(num_pages=4, page_size=page_size)


def test_an_empty_pool_is_refused():
    with pytest.raises(ValueError, match="at least one page"):
        PagePool(num_pages=0, page_size=4)


def test_full_pages_of_an_equal_prefix_are_shared_and_the_last_token_is_left_to_compute():
    pool = PagePool(num_pages=8, page_size=2)
    first = computed(pool, [1, 2, 3, 4])
    second = sequence([1, 2, 3, 4])
    assert pool.lookup(second) == first.pages[:1]
    longer = sequence([1, 2, 3, 4, 5])
    assert pool.lookup(longer) == first.pages[:2]


def test_equal_page_behind_another_prefix_is_no_hit():
    pool = PagePool(num_pages=8, page_size=2)
    computed(pool, [1, 2, 3, 4, 9])
    assert pool.lookup(sequence([7, 8, 3, 4, 9])) == []


def test_nothing_is_found_after_a_reset_to_another_digest():
    pool = PagePool(num_pages=4, page_size=2)
    pool.reset("a")
    seq = computed(pool, [1, 2, 3])
    pool.release(seq)
    pool.reset("b")
    assert pool.lookup(sequence([1, 2, 3])) == []
    assert pool.num_cached == 0


def test_a_key_belongs_to_its_digest():
    assert kv_cache.page_key(b"a", array("i", [1, 2])) != kv_cache.page_key(b"b", array("i", [1, 2]))


def test_a_reset_under_held_pages_is_a_bug():
    pool = PagePool(num_pages=4, page_size=2)
    computed(pool, [1, 2, 3])
    with pytest.raises(AssertionError, match="held across a weight swap"):
        pool.reset("b")


def test_a_free_page_that_was_released_longest_ago_is_taken_first():
    pool = PagePool(num_pages=4, page_size=2)
    old, new = computed(pool, [1, 2, 3]), computed(pool, [4, 5, 6])
    pool.release(old)
    pool.release(new)
    # Two pages hold a half-filled tail and are taken before any cached one, then the older prefix goes.
    admitted(pool, [7, 7, 7, 7, 7, 7])
    assert pool.lookup(sequence([1, 2, 3])) == []
    assert len(pool.lookup(sequence([4, 5, 6]))) == 1


def test_the_end_of_a_prefix_is_taken_before_its_beginning():
    pool = PagePool(num_pages=4, page_size=2)
    pool.release(computed(pool, [1, 2, 3, 4, 5]))
    # One page was never used, one held a half-filled tail, and the third to go is [3, 4].
    admitted(pool, [9, 9, 9, 9, 9])
    assert len(pool.lookup(sequence([1, 2, 3, 4, 5]))) == 1


def test_only_a_page_that_a_lookup_can_reach_is_cached():
    pool = PagePool(num_pages=8, page_size=2)
    first, second = admitted(pool, [1, 2, 3, 4, 5]), admitted(pool, [1, 2, 7, 8, 9])
    pool.advance(first, 5)
    pool.advance(second, 5)
    assert second.pages[0] != first.pages[0], "both computed it, unaware of each other"
    assert pool.lookup(sequence([1, 2, 7, 8, 9])) == first.pages[:1]
    assert pool.num_cached == 2


def test_a_younger_sequence_is_told_that_its_prefix_is_coming_and_an_older_one_is_not():
    pool = PagePool(num_pages=8, page_size=2)
    admitted(pool, [1, 2, 3, 4, 5], arrival=5)
    younger, older = sequence([1, 2, 3, 4, 6], arrival=6), sequence([1, 2, 3, 4, 6], arrival=4)
    assert pool.is_coming(younger, len(pool.lookup(younger)))
    assert not pool.is_coming(older, len(pool.lookup(older)))


def test_a_prefix_stops_coming_when_it_is_there_or_given_up():
    pool = PagePool(num_pages=8, page_size=2)
    owner = admitted(pool, [1, 2, 3, 4, 5], arrival=0)
    waiter = sequence([1, 2, 3, 4, 6], arrival=1)
    pool.advance(owner, 2)
    assert pool.is_coming(waiter, len(pool.lookup(waiter)))
    pool.advance(owner, 5)
    assert not pool.is_coming(waiter, len(pool.lookup(waiter)))
    given_up = admitted(pool, [8, 8, 8], arrival=2)
    pool.release(given_up)
    late = sequence([8, 8, 9], arrival=3)
    assert not pool.is_coming(late, len(pool.lookup(late)))


def test_allocation_that_does_not_fit_changes_nothing():
    pool = PagePool(num_pages=3, page_size=2)
    held = computed(pool, [1, 2, 3])
    before = pool.num_free
    seq = sequence([1, 2, 3, 4, 5, 6, 7])
    assert not pool.allocate(seq, pool.lookup(seq))
    assert not seq.pages
    assert pool.num_free == before
    fits = sequence([1, 2, 5])
    assert not pool.allocate(fits, pool.lookup(fits), spare=1)
    assert pool.allocate(fits, pool.lookup(fits))
    assert fits.pages[0] == held.pages[0]


def test_hash_collisions_cannot_make_a_hit(monkeypatch):
    monkeypatch.setattr(kv_cache, "page_key", lambda parent, token_ids: b"same")
    pool = PagePool(num_pages=8, page_size=2)
    computed(pool, [1, 2, 3, 4, 5])
    assert pool.lookup(sequence([3, 4, 3, 4, 5])) == []
    # Behind a page that is not the cached one nothing is cached either.
    computed(pool, [3, 4, 1, 2, 5])
    assert pool.num_cached == 1


@pytest.mark.parametrize("name", LIGHT_MODULES)
def test_scheduling_modules_import_no_tensors(name):
    tree = ast.parse(Path(f"services/rollout/{name}.py").read_text())
    imported = {n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    imported |= {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    heavy = {m for m in imported if m.split(".")[0] in ("torch", "numpy", "grpc", "transformers")}
    assert not heavy
    inside = {m for m in imported if m.startswith("services.rollout")}
    assert inside <= {f"services.rollout.{light}" for light in LIGHT_MODULES}


class Pool(RuleBasedStateMachine):
    """Random lives of sequences; a shadow of every page's content says what a hit may return."""

    @initialize(num_pages=st.integers(2, 12), page_size=st.sampled_from([1, 2, 4]), width=st.sampled_from([1, 3, 8]))
    def start(self, num_pages, page_size, width):
        self.real_key = kv_cache.page_key
        if width < 8:
            # A weak hash: hits must stay right, since the hash is only an index.
            kv_cache.page_key = lambda parent, ids: bytes([self.real_key(parent, ids)[0] % width])
        self.pool = PagePool(num_pages=num_pages, page_size=page_size)
        self.digest = "0"
        self.pool.reset(self.digest)
        self.running: list[Sequence] = []
        self.content: dict[int, tuple] = {}
        self.arrival = 0

    def teardown(self):
        if hasattr(self, "real_key"):
            kv_cache.page_key = self.real_key

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12), spare=st.integers(0, 2))
    def admit(self, tokens, spare):
        self.arrival += 1
        seq = sequence(tokens, self.arrival)
        hits = self.pool.lookup(seq)
        size = self.pool.page_size
        assert len(hits) * size < len(tokens)
        for index, page in enumerate(hits):
            assert self.content[page] == (self.digest, tuple(tokens[: (index + 1) * size]))
        if self.pool.allocate(seq, hits, spare=spare):
            assert seq.num_computed == len(hits) * size
            self.running.append(seq)
            for page in seq.pages[len(hits) :]:
                self.content.pop(page, None)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def compute(self, data):
        seq = data.draw(st.sampled_from(self.running))
        end = data.draw(st.integers(seq.num_computed, len(seq.token_ids)))
        size = self.pool.page_size
        for position in range(seq.num_computed, end):
            page = seq.pages[position // size]
            assert sum(page in s.pages for s in self.running) == 1, "a page written by one is read by another"
            if position % size == size - 1:
                self.content[page] = (self.digest, tuple(seq.token_ids[: position + 1]))
        self.pool.advance(seq, end)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), token=st.integers(0, 1))
    def grow(self, data, token):
        seq = data.draw(st.sampled_from(self.running))
        seq.token_ids.append(token)
        known = set(seq.pages)
        if self.pool.grow(seq, len(seq.token_ids)):
            for page in set(seq.pages) - known:
                self.content.pop(page, None)
        else:
            seq.token_ids.pop()

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def leave(self, data):
        seq = data.draw(st.sampled_from(self.running))
        self.running.remove(seq)
        self.pool.release(seq)
        assert not seq.pages

    @rule()
    def swap(self):
        for seq in self.running:
            self.pool.release(seq)
        self.running = []
        self.digest += "0"
        self.pool.reset(self.digest)

    @invariant()
    def every_page_is_free_or_held(self):
        if not hasattr(self, "pool"):
            return
        held = [p for s in self.running for p in s.pages]
        assert self.pool.num_free + len(set(held)) == self.pool.num_pages
        assert [self.pool._references[p] for p in range(self.pool.num_pages)] == [
            held.count(p) for p in range(self.pool.num_pages)
        ]
        for seq in self.running:
            assert len(seq.pages) == len(set(seq.pages)) == self.pool.num_pages_for(len(seq.token_ids))
        # A page never outlives those before it, or it could be found behind other ones.
        assert all(owner in self.running for owner in self.pool._claims.values())


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


@given(tokens=st.lists(st.integers(0, 9), min_size=1, max_size=30), page_size=st.sampled_from([1, 2, 4, 8]))
def test_a_released_sequence_is_found_again_as_far_as_its_full_pages_go(tokens, page_size):
    pool = PagePool(num_pages=32, page_size=page_size)
    pool.release(computed(pool, tokens))
    assert len(pool.lookup(sequence(tokens))) == (len(tokens) - 1) // page_size
