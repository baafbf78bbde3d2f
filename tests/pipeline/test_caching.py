import multiprocessing
import pickle
import sys

import lmdb
import pytest

from shardset.errors import FormatError, MissingExtraError, StorageError
from shardset.loading.ranks import Share
from shardset.pipeline.caching import Cached, LMDBCached
from shardset.pipeline.run import Run, Step


def samples(count, epoch=0):
    return [{"__key__": f"k{number}", "value": (epoch, number)} for number in range(count)]


def values(found):
    return [sample["value"] for sample in found]


def begin(stage, source, epoch=0, **settings):
    return stage.start(source, Step(Run(epoch=(epoch,), **settings), 1, stage.name))


def never():
    raise AssertionError("the source is asked")
    yield


@pytest.fixture(params=["memory", "lmdb"])
def stage(request, tmp_path):
    return Cached() if request.param == "memory" else LMDBCached(tmp_path / "cache", chunksize=3)


def test_a_whole_pass_is_kept_and_given_again_without_asking_the_source(stage):
    assert values(begin(stage, samples(10))) == [(0, number) for number in range(10)]
    assert values(begin(stage, never(), 1)) == [(0, number) for number in range(10)]


def test_a_pass_that_is_given_up_is_not_kept(stage):
    begun = begin(stage, samples(10))
    assert [next(begun)["value"], next(begun)["value"]] == [(0, 0), (0, 1)]
    begun.close()
    assert len(values(begin(stage, samples(7, 1), 1))) == 7
    assert values(begin(stage, never(), 2)) == [(1, number) for number in range(7)]


def test_a_pass_that_fails_is_not_kept(stage):
    def failing():
        yield from samples(5)
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        list(begin(stage, failing()))
    assert values(begin(stage, samples(3, 1), 1)) == [(1, number) for number in range(3)]


def test_a_pass_that_a_handler_ended_is_not_kept(stage):
    run = Run()

    def stopped():
        yield from samples(2)
        run.report.add("stopped_by_handler")

    assert len(list(stage.start(stopped(), Step(run, 1)))) == 2
    assert values(begin(stage, samples(3, 1), 1)) == [(1, number) for number in range(3)]


def test_an_empty_pass_is_kept_too(stage):
    assert list(begin(stage, [])) == []
    assert list(begin(stage, never(), 1)) == []


def test_stages_behind_may_change_dicts_without_changing_what_is_kept(stage):
    for _ in range(3):
        for sample in begin(stage, samples(5)):
            assert "seen" not in sample
            sample["seen"] = True
            sample["value"] = None
    assert values(begin(stage, never())) == [(0, number) for number in range(5)]


def test_samples_of_any_kind_are_kept(stage):
    given = [(1, b"a"), [2], "text", 3.5, {"a": 1}]
    assert list(begin(stage, given)) == given
    assert list(begin(stage, never())) == given


def test_samples_with_one_key_do_not_replace_each_other(stage):
    given = [{"__key__": "same", "value": number} for number in range(8)]
    assert list(begin(stage, given)) == given
    assert list(begin(stage, never())) == given


def test_it_works_outside_of_a_pipeline(stage):
    assert len(list(stage.run(samples(2)))) == 2
    assert len(list(stage(never()))) == 2


def test_it_pickles_without_what_it_keeps(stage):
    list(begin(stage, samples(3)))
    again = pickle.loads(pickle.dumps(stage))
    assert repr(again) == repr(stage)
    assert len(pickle.dumps(stage)) < 400


def test_memory_is_not_shared_between_a_process_and_the_workers_made_from_it():
    stage = Cached()
    list(begin(stage, samples(10)))
    worker = Share(0, 1, 0, 2)
    assert len(list(begin(stage, samples(5), share=worker))) == 5
    assert len(list(begin(stage, never(), share=worker))) == 5


def test_two_passes_at_once_keep_one_of_them(stage):
    first, second = begin(stage, samples(6)), begin(stage, samples(6, 1))
    together = list(zip(first, second, strict=False))
    assert len(together) == 6
    list(first)
    list(second)
    found = values(begin(stage, samples(6, 2), 2))
    assert len(found) == 6
    assert len({epoch for epoch, _ in found}) == 1


@pytest.fixture
def cache(tmp_path):
    return LMDBCached(tmp_path / "deep" / "cache", map_size=1 << 24, chunksize=4)


def shares(count):
    return [Share(0, 1, number, count) for number in range(count)]


def parts(count, epoch=0):
    return [samples(20, epoch)[number::count] for number in range(count)]


def test_a_database_lasts_longer_than_its_stage(cache, tmp_path):
    assert not cache.is_complete()
    list(begin(cache, samples(10)))
    assert cache.is_complete()
    assert len(list(begin(LMDBCached(str(tmp_path / "deep" / "cache")), never()))) == 10


def test_several_workers_fill_a_database_and_any_number_shares_it(cache):
    for share, part in zip(shares(4), parts(4), strict=True):
        assert not cache.is_complete()
        list(begin(cache, part, share=share))
    for count in (1, 2, 3, 4, 7):
        found = [values(begin(cache, never(), 1, share=share)) for share in shares(count)]
        assert sorted(value for part in found for value in part) == [(0, number) for number in range(20)]
        assert max(map(len, found)) - min(map(len, found)) <= 1


def test_workers_that_begin_the_next_epoch_before_others_are_through_make_all_read_anew(cache):
    one, two = shares(2)
    list(begin(cache, parts(2)[0], share=one))
    early = begin(cache, parts(2, 1)[0], 1, share=one)
    assert next(early)["value"][0] == 1
    list(begin(cache, parts(2)[1], share=two))
    assert not cache.is_complete()
    assert len(values(begin(cache, parts(2, 1)[1], 1, share=two))) == 10
    list(early)
    found = [values(begin(cache, never(), 2, share=share)) for share in (one, two)]
    assert sorted(found[0] + found[1]) == [(1, number) for number in range(20)]


def test_parts_of_different_epochs_are_never_put_together(cache):
    one, two = shares(2)
    list(begin(cache, parts(2)[0], share=one))
    list(begin(cache, parts(2, 1)[1], 1, share=two))
    assert not cache.is_complete()


def test_another_number_of_workers_begins_anew(cache):
    list(begin(cache, parts(2)[0], share=shares(2)[0]))
    list(begin(cache, samples(20, 1), 1))
    assert values(begin(cache, never(), 2)) == [(1, number) for number in range(20)]


def test_another_process_of_the_same_share_only_passes_its_samples_on(cache, tmp_path):
    begun = begin(cache, samples(10))
    next(begun)
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        assert pool.apply(_count_in_pass, (cache, 10)) == 10
    list(begun)
    assert values(begin(cache, never(), 1)) == [(0, number) for number in range(10)]
    assert [path.name for path in (tmp_path / "deep" / "cache").iterdir() if "writing" in path.name] == []


def _count_in_pass(cache, count):
    return len(list(begin(cache, samples(count, 5), 5)))


def test_a_database_that_lacks_samples_says_so(cache, tmp_path):
    list(begin(cache, samples(10)))
    with lmdb.open(str(tmp_path / "deep" / "cache")) as database, database.begin(write=True) as transaction:
        key = next(key for key, _ in transaction.cursor() if b"sample" in key)
        transaction.delete(key)
    with pytest.raises(FormatError, match="holds 9 samples and says that it has 10"):
        list(begin(cache, never()))


def test_a_database_of_webdataset_is_given_in_the_order_of_its_keys(tmp_path):
    with lmdb.open(str(tmp_path / "cache")) as database, database.begin(write=True) as transaction:
        for sample in samples(9):
            transaction.put(sample["__key__"].encode(), pickle.dumps(sample))
        transaction.put(b"_", b"1")
    cache = LMDBCached(tmp_path / "cache")
    assert cache.is_complete()
    assert values(begin(cache, never())) == [(0, number) for number in range(9)]
    assert values(begin(cache, never(), share=Share(0, 1, 1, 2))) == [(0, number) for number in range(1, 9, 2)]


def test_a_database_without_room_says_what_to_do(tmp_path):
    cache = LMDBCached(tmp_path / "cache", map_size=1 << 16)
    with pytest.raises(StorageError, match="give a larger map_size"):
        list(begin(cache, [{"a": bytes(100_000)} for _ in range(10)]))


def test_a_pickler_of_the_callers_own_is_used_and_goes_to_other_processes(tmp_path):
    cache = pickle.loads(pickle.dumps(LMDBCached(tmp_path / "cache", pickler=Text())))
    list(begin(cache, ["a", "b"]))
    assert list(begin(cache, never())) == ["A", "B"]


class Text:
    def dumps(self, obj):
        return obj.encode()

    def loads(self, data):
        return data.decode().upper()


def test_chunks_have_at_least_one_sample(tmp_path):
    with pytest.raises(ValueError, match="chunksize=0"):
        LMDBCached(tmp_path, chunksize=0)


def test_without_lmdb_the_error_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "lmdb", None)
    with pytest.raises(MissingExtraError, match=r"shardset\[lmdb\]"):
        list(begin(LMDBCached(tmp_path), []))
