from __future__ import annotations

import re
from typing import get_args

import pytest

from shardset.doctor.findings import CODES, KINDS, Severity, make_finding
from shardset.formats.tfrecord_inflate import StreamCode
from shardset.formats.tfrecord_salvage import Code


def test_every_kind_has_a_code_of_its_group_a_word_of_its_own_and_text():
    assert len(CODES) == len(KINDS)
    for code, kind in KINDS.items():
        assert re.fullmatch(r"R[0-3]\d\d", code)
        assert kind.severity in get_args(Severity)
        assert kind.meaning
        assert kind.hint


def test_all_that_salvage_and_decompression_can_say_has_a_code():
    assert {*get_args(Code), *get_args(StreamCode)} <= set(CODES)
    assert all(CODES[word].startswith("R1") for word in get_args(Code))
    assert all(CODES[word].startswith("R2") for word in get_args(StreamCode))


def test_a_finding_has_what_its_kind_says():
    finding = make_finding("trailing_nuls", "a.tfrecord", 7, "NULs", lost_bytes=12)
    assert (finding.code, finding.word, finding.severity) == ("R107", "trailing_nuls", "error")
    assert "no record is lost" in finding.hint
    with pytest.raises(KeyError):
        make_finding("unheard_of", "a", None, "")
