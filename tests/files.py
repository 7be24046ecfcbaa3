"""The folder of the repository, what is in a folder, and a pickle that does harm."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[1]


def contents(folder):
    """Files in a folder and in those inside it: path -> bytes."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def events_of(folder):
    """What TensorBoard shows of a run, all of it."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sizes = dict.fromkeys(("scalars", "images", "tensors"), 0)
    return EventAccumulator(str(folder), size_guidance=sizes).Reload()


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (self.path,))
