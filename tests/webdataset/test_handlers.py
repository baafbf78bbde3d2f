from shardset.pipeline import handlers as ours
from shardset.webdataset import handlers


def test_the_handlers_are_those_of_the_pipeline():
    assert len(handlers.__all__) == 5
    for name in handlers.__all__:
        assert getattr(handlers, name) is getattr(ours, name)
