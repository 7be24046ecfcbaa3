"""What loggers must have been given: drawn and written anew from a monitor's history."""

import operator
from io import BytesIO

from PIL import Image

from embedgeo import Anisotropy, StepMonitor
from embedgeo.report.live import LivePictures
from tests.models import gpt_neox, token_batch
from tests.training.runs import steps, value


def few(dim):
    """Metrics of which few pictures are drawn."""
    return [Anisotropy(dim)]


def pictures(history, step):
    """The PNGs of a history up to a step, by tag."""
    until = [record for record in history if record["step"] <= step]
    return {tag: png for tag, (png, _, _) in LivePictures().draw(until, is_due=True)}


def assert_all_pictures(found, monitor, same=operator.eq, name=str):
    """The PNGs by tag and step are what is drawn; all are there at the first measurement and at the
    last.

    ``same`` compares two PNGs; ``name`` is how the logger writes a tag.
    """
    expected = {
        (name(tag), step): png
        for step in {step for _, step in found}
        for tag, png in pictures(monitor.history, step).items()
    }
    for step in (steps(monitor)[0], steps(monitor)[-1]):
        tags = {tag for tag, at in expected if at == step}
        assert tags == {tag for tag, at in found if at == step}
        assert len(tags) == 3
    assert all(same(png, expected[key]) for key, png in found.items())


def same_pixels(one, other):
    """Whether two PNGs show the same."""
    one, other = (Image.open(BytesIO(png)).convert("RGB") for png in (one, other))
    return one.size == other.size and one.tobytes() == other.tobytes()


def values(monitor):
    """The anisotropy of the second block, by step."""
    return {step: value(monitor, step, "block.01", "anisotropy") for step in steps(monitor)}


def loop(log):
    """A plain loop that is monitored at its first and last weights; gives the monitor."""
    model = gpt_neox()
    with StepMonitor(model, log=log, metrics=few, on_error="raise") as monitor:
        for step in range(2):
            with monitor.step(step, batch := token_batch(seed=step)):
                model(**batch, labels=batch["input_ids"]).loss.backward()
    return monitor
