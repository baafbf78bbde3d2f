import pickle

import pytest

from shardset.pipeline import handlers
from timing import least_seconds


@pytest.mark.parametrize(
    ("handler", "answer"), [(handlers.ignore_and_continue, True), (handlers.ignore_and_stop, False)]
)
def test_handlers_that_ignore_say_nothing(handler, answer, recwarn):
    assert handler(ValueError("what happened")) is answer
    assert not recwarn.list


@pytest.mark.parametrize(("handler", "answer"), [(handlers.warn_and_continue, True), (handlers.warn_and_stop, False)])
def test_handlers_that_warn_do_so_at_once(handler, answer):
    def warn():
        with pytest.warns(UserWarning, match="what happened"):
            assert handler(ValueError("what happened")) is answer

    assert least_seconds(warn, 0.4) < 0.4


def test_reraise_exception_raises_the_very_error():
    error = ValueError("what happened")
    with pytest.raises(ValueError, match="what happened") as caught:
        handlers.reraise_exception(error)
    assert caught.value is error


def test_handlers_pickle():
    names = ["reraise_exception", "ignore_and_continue", "ignore_and_stop", "warn_and_continue", "warn_and_stop"]
    for handler in [getattr(handlers, name) for name in names]:
        assert pickle.loads(pickle.dumps(handler)) is handler
