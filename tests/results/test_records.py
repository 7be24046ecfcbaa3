"""Records in columns, as a monitor's history has them."""

import json
import pickle
import tracemalloc
from collections.abc import Sequence
from math import inf, nan

from embedgeo.results.records import Records
from tests.records import layer_records


def of_steps(*steps):
    """Records of two layers, some of their values undefined."""
    records = [record for step in steps for record in layer_records(step, step / 3)]
    records[0] |= {"value": nan, "stderr": 0.5}
    records[-1] |= {"value": -inf, "layer_index": -1, "width": 0}
    return records


def test_a_record_takes_at_most_40_bytes():
    records = Records()
    tracemalloc.start()
    for step in range(9000):  # as measurements come
        records.extend(layer_records(step, step / 7))
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held / len(records) <= 40


def test_they_are_a_sequence_of_the_same_records():
    expected = of_steps(0, 5, 10**12)
    records = Records(expected)
    assert isinstance(records, Sequence)
    assert len(records) == len(expected) == 6
    assert records == expected
    assert list(records) == expected
    assert [records[i] for i in range(-6, 6)] == expected * 2
    for part in (slice(2, 4), slice(None, None, -2), slice(9, None)):
        assert records[part] == expected[part]
    assert records != of_steps(0)
    assert json.dumps(list(records)) == json.dumps(expected)
    kept = pickle.loads(pickle.dumps(records))
    records[0]["value"] = records[:1][0]["value"] = next(iter(records))["value"] = 7.0  # a copy's
    assert records == kept == expected


def test_they_grow_and_lose_records_as_a_list_does():
    records, expected = Records(), []
    for some in (of_steps(0, 1, 2), of_steps(9)):
        for each in (records, expected):
            each.extend(some)
            del each[5:], each[1]
        assert records == expected
    del records[:]
    assert records == []
