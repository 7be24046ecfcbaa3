"""The benchmark of a GPU runs on tiny sizes, also on the CPU, and its JSON has the fields that it
documents.
"""

import json
import re

import pytest
import torch

from benchmarks import gpu

PARTS = [
    "tf32",
    "twonn",
    "measurement",
    "ranks",
    "steps tiny eager",
    "steps tiny stable",
]


def names(value):
    """All field names of nested results."""
    if isinstance(value, list):
        return set().union(*map(names, value))
    return set(value).union(*map(names, value.values())) if isinstance(value, dict) else set()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores for float32:UserWarning")
def test_all_parts_run_and_their_fields_are_documented(tmp_path):
    file = tmp_path / "gpu.json"
    gpu.main(["--tiny", "--json", str(file), "--only", *PARTS])
    results = json.loads(file.read_text())
    assert not results["errors"]
    assert results["device"]["is_gpu"] is torch.cuda.is_available()
    assert torch.cuda.is_available() or "CPU" in results["device"]["name"]
    parts = {name.split()[0] for name in results}
    assert parts == {"device", "errors", *(part.split()[0] for part in PARTS)}
    documented = set(re.findall(r"``(\w+)", gpu.__doc__))
    assert parts <= documented
    fields = {
        field
        for name, part in results.items()
        if name.startswith(("steps", "twonn"))
        for field in names(part)
    }
    fields |= {
        field for name, part in results.items() if name.startswith("measurement") for field in part
    }
    assert {
        field for field in fields if field.endswith(("_ms", "_MB", "_waits", "_plain"))
    } <= documented
