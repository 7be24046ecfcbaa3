"""Records in columns, as a monitor's history has them."""

import copy
import json
import pickle
import tracemalloc
from collections.abc import Sequence
from math import inf, nan

import pandas as pd
import pytest

from embedgeo.results.records import Records
from tests.records import layer_records

LAYERS = ("embed", *(f"block.{i:02d}" for i in range(12)), "final_norm", "mean")
METRICS = tuple(f"metric_{i}" for i in range(50))


def of_steps(*steps):
    """Records of two layers, some of their values undefined."""
    records = [record for step in steps for record in layer_records(step, step / 3)]
    records[0] |= {"value": nan, "stderr": 0.5}
    records[-1] |= {"value": -inf, "layer_index": -1, "width": 0}
    return records


def test_a_record_takes_at_most_40_bytes():
    records = Records()
    tracemalloc.start()
    for step in range(300):  # as measurements come
        records.extend(layer_records(step, step / 7, layers=LAYERS, metrics=METRICS))
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(records) == 300 * len(LAYERS) * len(METRICS)
    assert held / len(records) <= 40


def test_they_are_a_sequence_of_the_same_records():
    expected = of_steps(0, 5, 10**12)
    records = Records(expected)
    assert isinstance(records, Sequence)
    assert len(records) == len(expected) == 6
    assert repr(records) == repr(expected)
    assert records == expected
    assert expected == records
    assert list(records) == expected
    assert [records[i] for i in range(-6, 6)] == expected * 2
    assert list(reversed(records)) == expected[::-1]
    for part in (slice(2, 4), slice(-2, None), slice(None, None, -2), slice(9, None)):
        assert records[part] == expected[part]
    assert expected[3] in records
    assert records.index(expected[3]) == 3
    with pytest.raises(IndexError):
        records[6]


def test_other_records_are_not_equal_to_them():
    records, others = Records(of_steps(0, 5)), of_steps(0, 5)
    others[2]["value"] = 0.1
    assert records != others
    assert records != Records(others)
    assert records != of_steps(0)
    assert records != "records"
    assert Records() == []
    assert not Records()


def test_each_access_gives_a_new_dict():
    records = Records(of_steps(0))
    for taken in (records[0], records[:1][0], next(iter(records))):
        taken["value"] = 7.0
        taken["more"] = 1
    assert records == of_steps(0)


def test_they_grow_and_lose_records_as_a_list_does():
    records, expected = Records(), []
    for step in range(4):
        records.extend(of_steps(step))
        expected += of_steps(step)
    del records[5:]
    del expected[5:]
    assert records == expected
    del records[1]
    del expected[1]
    assert records == expected
    records.extend(of_steps(9))
    assert records == [*expected, *of_steps(9)]
    del records[:]
    assert records == []


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_a_copy_has_the_same_records_for_itself(copied):
    records = Records(of_steps(0, 1))
    copy_of_them = copied(records)
    del records[:]
    assert copy_of_them == of_steps(0, 1)


def test_json_and_pandas_take_them():
    expected = of_steps(0, 1)
    assert json.dumps(list(Records(expected))) == json.dumps(expected)
    pd.testing.assert_frame_equal(pd.DataFrame(Records(expected)), pd.DataFrame(expected))
