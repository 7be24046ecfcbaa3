"""A worker of a sweep that runs no model, and is no process of its own."""

import hashlib
import math

from embedgeo.checkpoints.files import weight_types
from embedgeo.results.records import Record
from embedgeo.sweep.measure import Measured


class Reader:
    """Fetches checkpoints, and measures the digest of their weights and ``config.json``."""

    def __init__(self, settings, texts, downloads, make_metrics):
        self.downloads = downloads

    def measure(self, checkpoint, choose_next):
        try:
            checkpoint = checkpoint.hashed()
            folder = self.downloads.start(checkpoint).result()
            contents = checkpoint.contents or checkpoint.read_contents()
            for name in contents.digests:
                weight_types(folder / name)
            if (upcoming := choose_next()) is not None:
                self.downloads.start(upcoming)
            return Measured([_record(contents)], checkpoint=checkpoint)
        finally:
            self.downloads.remove(checkpoint)


def _record(contents):
    identity = f"{contents.sha256} {contents.config_digest}"
    value = float(int(hashlib.sha256(identity.encode()).hexdigest()[:8], 16))
    return Record(
        layer="block.00", layer_index=1, width=16, metric="Q", value=value, stderr=math.nan
    )
