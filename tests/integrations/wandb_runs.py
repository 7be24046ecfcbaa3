"""Reads what Weights & Biases keeps of an offline run, which has no public reader."""

import json
import struct
import time
from pathlib import Path

import wandb
from wandb.proto.wandb_internal_pb2 import Record

HEADER, BLOCK, CHUNK = 7, 32_768, 7


def records(run_folder):
    """The records of a run's log, a LevelDB log: blocks of chunks, each with a checksum, its length
    and its kind.
    """
    (path,) = Path(run_folder).glob("*.wandb")
    data, at, whole = path.read_bytes(), HEADER, b""
    while at + CHUNK <= len(data):
        if BLOCK - at % BLOCK < CHUNK:
            at += BLOCK - at % BLOCK
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + CHUNK])
        if at + CHUNK + length > len(data):
            return  # it is being written
        whole += data[at + CHUNK : at + CHUNK + length]
        at += CHUNK + length
        if kind in (1, 4):  # whole, or its last part
            record = Record()
            record.ParseFromString(whole)
            whole = b""
            yield record


def rows(run_folder):
    """The history: values by key; of a value with parts a dict."""
    for record in records(run_folder):
        if record.WhichOneof("record_type") == "history":
            row = {}
            for item in record.history.item:
                path = [item.key] if item.key else list(item.nested_key)
                place = row
                for key in path[:-1]:
                    place = place.setdefault(key, {})
                place[path[-1]] = json.loads(item.value_json)
            yield row


def axes(run_folder):
    """The step metric of each name that has one."""
    metrics = [
        record.metric
        for record in records(run_folder)
        if record.WhichOneof("record_type") == "metric"
    ]
    return {
        metric.glob_name or metric.name: metric.step_metric
        for metric in metrics
        if metric.step_metric
    }


def finished():
    """End the run and wait until its log is whole, which wandb does not; its folder."""
    folder = Path(wandb.run.dir).parent
    wandb.finish()
    deadline = time.monotonic() + 60
    while "exit" not in (record.WhichOneof("record_type") for record in records(folder)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return folder


def media(run_folder, rows, kind):
    """The files of a kind of value by key: pairs of a row and the file's bytes."""
    found = {}
    for row in rows:
        for key, value in row.items():
            if isinstance(value, dict) and value.get("_type") == kind:
                found.setdefault(key, []).append(
                    (row, (run_folder / "files" / value["path"]).read_bytes())
                )
    return found
