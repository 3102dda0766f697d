from hypothesis import given
from hypothesis import strategies as st

from replay_pipeline.storage.folds import Fold

KEYS = [f"k{i:02d}" for i in range(10)]


def test_going_through_all_batches_reads_each_once():
    read: list[str] = []

    def add(value: str, key: str) -> str:
        read.append(key)
        return value + key

    seen = Fold(lambda: KEYS, start=str, add=add)
    assert [seen.before(key) for key in KEYS] == ["".join(KEYS[:i]) for i in range(10)]
    assert read == KEYS[:-1]


steps = st.lists(
    st.tuples(st.sampled_from(["ask", "write", "new"]), st.sampled_from(KEYS)), max_size=30
)


@given(st.sets(st.sampled_from(KEYS)), steps)
def test_the_value_is_always_that_of_the_batches_as_they_are(there, steps):
    version = dict.fromkeys(there, 1)
    seen = Fold(lambda: sorted(version), start=list, add=lambda v, k: [*v, (k, version[k])])
    for step, key in steps:
        if step == "new" or (step == "write" and key in version):
            version[key] = version.get(key, 0) + 1
            seen.forget(key)
        assert seen.before(key) == [(k, version[k]) for k in sorted(version) if k < key]
