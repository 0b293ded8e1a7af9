"""A cache that namespaces share without finding or pushing out each other's."""

import random

import pytest

from everwarm.lru import NamespacedLru


def test_a_namespace_does_not_find_what_another_put_in():
    cache: NamespacedLru[str] = NamespacedLru(100)
    cache.put("a", "key", "A's", 10)
    assert cache.get("b", "key") is None and list(cache.values("b")) == []
    assert cache.get("a", "key") == "A's", "the control: whoever put it in finds it"
    cache.put("b", "key", "B's", 10)
    assert (cache.get("a", "key"), cache.get("b", "key")) == ("A's", "B's")


@pytest.mark.parametrize("n_put", [50, 1000])
def test_one_namespace_cannot_push_out_another_below_an_equal_share(n_put):
    cache: NamespacedLru[int] = NamespacedLru(100)
    for i in range(5):
        cache.put("a", i, i, 10)
    for i in range(n_put):
        cache.put("b", i, i, 10)
        cache.check()
    assert all(cache.get("a", i) == i for i in range(5)) and cache.n_bytes == 100


def test_above_its_share_a_namespace_loses_its_oldest():
    cache: NamespacedLru[int] = NamespacedLru(100)
    for i in range(10):
        cache.put("a", i, i, 10)
    cache.get("a", 0)
    for i in range(20):
        cache.put("b", i, i, 10)
    assert [i for i in range(10) if cache.get("a", i) is not None] == [0, 6, 7, 8, 9]


def test_alone_it_is_an_ordinary_lru():
    cache: NamespacedLru[int] = NamespacedLru(30)
    for i in (1, 2, 3):
        cache.put("", i, i, 10)
    cache.get("", 1)
    cache.put("", 4, 4, 10)
    assert [cache.get("", i) for i in (1, 2, 3, 4)] == [1, None, 3, 4]
    cache.put("", 5, 5, 31)
    assert cache.get("", 5) is None and len(cache) == 3, "one too large sends nobody away"
    cache.put("", 4, 44, 20)
    assert cache.get("", 4) == 44 and cache.n_bytes == 30
    cache.clear()
    cache.check()
    assert len(cache) == 0


def test_entries_are_bounded_too():
    cache: NamespacedLru[int] = NamespacedLru(1 << 20, max_entries=4)
    cache.put("a", 0, 0, 1)
    for i in range(10):
        cache.put("b", i, i, 1)
        cache.check()
    assert len(cache) == 4 and cache.get("a", 0) == 0


@pytest.mark.parametrize("seed", range(5))
def test_random_steps_keep_the_books(seed):
    rng, cache = random.Random(seed), NamespacedLru[int](500, max_entries=40)
    for i in range(2000):
        name, key = f"n{rng.randrange(12)}", rng.randrange(30)
        match rng.randrange(4):
            case 0:
                cache.remove(name, key)
            case 1:
                cache.get(name, key)
            case _:
                cache.put(name, key, i, rng.randrange(1, 60))
        cache.check()
