from hypothesis import given
from hypothesis import strategies as st

from holdfast.router.records.lru import Lru

KEYS = st.sampled_from("abcdef")
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), KEYS, st.integers(1, 4), st.integers(1, 5)),
        st.tuples(st.just("get"), KEYS, st.just(0), st.just(0)),
    ),
    max_size=60,
)


class NaiveMap:
    """A list from the least to the most recently used; slow and plain."""

    def __init__(self, entries, weight):
        self.entries, self.weight, self.items = entries, weight, []

    def get(self, key, now):
        for item in list(self.items):
            if item[0] == key:
                self.items.remove(item)
                if now < item[2]:
                    self.items.append(item)
                    return item[1]
        return None

    def put(self, key, value, deadline, weight):
        self.items = [item for item in self.items if item[0] != key]
        if weight > self.weight:
            return
        self.items.append((key, value, deadline, weight))
        while len(self.items) > self.entries or sum(item[3] for item in self.items) > self.weight:
            self.items.pop(0)


@given(OPERATIONS, st.integers(1, 4), st.integers(3, 12))
def test_behaves_like_a_plain_list(operations, entries, weight):
    lru, naive = Lru(entries, weight), NaiveMap(entries, weight)
    for now, (word, key, size, life) in enumerate(operations):
        if word == "put":
            lru.put(key, now, now + life, size)
            naive.put(key, now, now + life, size)
        else:
            assert lru.get(key, now) == naive.get(key, now)
        assert len(lru) == len(naive.items) <= entries
        assert lru.weight == sum(item[3] for item in naive.items) <= weight


def test_a_full_map_takes_from_whoever_has_more_than_a_share():
    lru = Lru(1000, 100, share=0.5)
    for number in range(3):
        lru.put(f"small{number}", number, 10.0, 10, "small")
    for number in range(50):
        lru.put(f"big{number}", number, 10.0, 10, "big")
    assert [lru.get(f"small{number}", 0.0) for number in range(3)] == [0, 1, 2]
    assert [number for number in range(50) if lru.get(f"big{number}", 0.0) is not None] == list(range(43, 50))
    for number in range(3, 6):  # up to half of it; beyond that the new owner has more than a share
        lru.put(f"small{number}", number, 10.0, 10, "small")
    assert [number for number in range(6) if lru.get(f"small{number}", 0.0) is not None] == [1, 2, 3, 4, 5]
    assert lru.weight == 100


def test_alone_an_owner_has_all_of_it():
    lru = Lru(4, None, share=0.25)
    for number in range(6):
        lru.put(str(number), number, 10.0, owner="only")
    assert [lru.get(str(number), 0.0) for number in range(6)] == [None, None, 2, 3, 4, 5]
