"""The flat form of results."""

import pickle
import sys
from math import nan

from embedgeo.results.records import Record, dated


def test_the_records_of_a_run_are_dicts_of_half_the_size() -> None:
    layers = [
        Record(layer="embed", layer_index=i, width=64, metric="V", value=i / 3, stderr=float("nan")) for i in range(64)
    ]
    records = [dated(7, record) for record in layers]
    for record, layer in zip(records, layers, strict=True):
        assert type(record) is dict
        assert list(record) == ["step", *layer]
        assert record == {"step": 7, **layer, "stderr": nan}
    # the first ones have room for more keys
    assert sys.getsizeof(records[-1]) <= sys.getsizeof(dict([*records[-1].items()])) / 2
    assert repr(pickle.loads(pickle.dumps(records))) == repr(records)
