import itertools
import subprocess
import sys

import pytest

from shardset.webdataset import utils


def test_repeatedly_goes_over_a_source_again_until_a_limit():
    assert list(utils.repeatedly(range(3), nepochs=2)) == [0, 1, 2, 0, 1, 2]
    assert list(utils.repeatedly(range(3), nbatches=4)) == [0, 1, 2, 0]
    assert list(utils.repeatedly(range(3), nepochs=0)) == []
    assert list(itertools.islice(utils.repeatedly(range(3)), 7)) == [0, 1, 2, 0, 1, 2, 0]


def test_repeatedly_counts_samples_as_it_is_told():
    batches = [[[1, 1, 1]], [[2]]]
    assert list(utils.repeatedly(batches, nsamples=5)) == [*batches, batches[0]]
    assert len(list(utils.repeatedly([1, 2, 3], nsamples=10, batchsize=lambda item: item))) == 6


def test_repeatedly_does_not_spin_on_what_gives_nothing():
    with pytest.raises(ValueError, match="pass 0 over the source gave nothing"):
        list(utils.repeatedly([]))
    found = utils.repeatedly(iter([1, 2]), nepochs=3)
    assert [next(found), next(found)] == [1, 2]
    with pytest.raises(ValueError, match="not an iterator"):
        next(found)


def test_repeatedly0_gives_the_first_of_each_pass():
    assert list(utils.repeatedly0(range(5), nepochs=2, nbatches=3)) == [0, 1, 2, 0, 1, 2]


def test_seeds_are_the_same_in_every_process_and_depend_on_each_argument():
    code = "from shardset.webdataset.utils import make_seed; print(make_seed('a', 1, None))"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert int(found) == utils.make_seed("a", 1, None)
    seeds = [utils.make_seed(*given) for given in [(), (1,), (1, 2), (2, 1), ("1",), ("1", "2"), ("12",)]]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_worker_info_comes_from_the_environment(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "WORKER", "NUM_WORKERS"):
        monkeypatch.delenv(name, raising=False)
    assert utils.pytorch_worker_info() == (0, 1, 0, 1)
    for name, value in {"RANK": "2", "WORLD_SIZE": "4", "WORKER": "1", "NUM_WORKERS": "3"}.items():
        monkeypatch.setenv(name, value)
    assert utils.pytorch_worker_info() == (2, 4, 1, 3)
    assert utils.pytorch_worker_seed() == 2001
    monkeypatch.setenv("RANK", "4")
    with pytest.raises(ValueError, match="RANK"):
        utils.pytorch_worker_info()


def test_text_and_bytes_are_not_iterable():
    assert [utils.is_iterable(value) for value in ([], (), {}, iter([]), range(3))] == [True] * 5
    assert [utils.is_iterable(value) for value in ("a", b"a", 5, None)] == [False] * 4


def test_patterns_may_have_braces(tmp_path):
    for name in ("a-0.tar", "a-1.tar", "b-0.tar", "c-0.tar"):
        (tmp_path / name).touch()
    found = utils.glob_with_braces(f"{tmp_path}/{{a,b}}-*.tar")
    assert sorted(path.rpartition("/")[2] for path in found) == ["a-0.tar", "a-1.tar", "b-0.tar"]
    assert utils.fnmatch_with_braces("x.png", "*.{jpg,png}")
    assert not utils.fnmatch_with_braces("x.gif", "*.{jpg,png}")


def test_symbols_are_looked_up_in_modules():
    assert utils.lookup_sym("make_seed", ["json", ".utils"]) is utils.make_seed
    assert utils.lookup_sym("no_such_name", ["json", ".utils"]) is None


def test_deprecated_functions_warn():
    @utils.deprecated
    def plain(value):
        return value

    @utils.deprecated("use another")
    def with_reason(value):
        return value

    with pytest.warns(DeprecationWarning, match="plain is deprecated"):
        assert plain(1) == 1
    with pytest.warns(DeprecationWarning, match="with_reason is deprecated: use another"):
        assert with_reason(2) == 2


def test_obsolete_functions_raise_unless_permitted(monkeypatch):
    @utils.obsolete
    def plain(value):
        return value

    @utils.obsolete(reason="gone")
    def with_reason(value):
        return value

    monkeypatch.delenv("ALLOW_OBSOLETE", raising=False)
    with pytest.raises(utils.ObsoleteException, match="plain is obsolete"):
        plain(1)
    with pytest.raises(utils.ObsoleteException, match="with_reason is obsolete: gone"):
        with_reason(1)
    monkeypatch.setenv("ALLOW_OBSOLETE", "1")
    assert plain(1) == with_reason(1) == 1


def test_a_pipeline_stage_is_for_classes_made_from_it():
    with pytest.raises(NotImplementedError):
        utils.PipelineStage().invoke()


def test_weights_of_datasets_follow_their_sizes():
    assert utils.compute_sample_weights([(10, 1.0), (5, 1.0), (20, 0.25)]).tolist() == [1.0, 0.5, 0.5]
    assert utils.guess_batchsize(([1, 2, 3], "x")) == 3
    assert utils.identity(5) == 5


@pytest.mark.parametrize(("value", "is_set"), [("1", "True"), ("0", "False"), ("", "False")])
def test_the_environment_can_enforce_security(value, is_set, monkeypatch):
    monkeypatch.setenv("WDS_SECURE", value)
    code = "from shardset.webdataset import utils; print(utils.enforce_security)"
    assert (
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()
        == is_set
    )
