"""Pictures for TensorBoard while a model trains."""

import io

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from embedgeo import EmbeddingMoments, GeometryMonitor
from embedgeo.glossary import headlines, known_terms
from embedgeo.report import live
from embedgeo.training.loggers import Adapter, Media
from tests.records import layer_records
from tests.training.runs import TinyLM, fit, moments

LAYERS = ["embed", "block.00", "block.01", "final_norm"]


def events(folder):
    return EventAccumulator(
        str(folder), size_guidance={"images": 0, "scalars": 0, "tensors": 0}
    ).Reload()


def records(step, value=1.0, layers=LAYERS, metrics=("mean_cosine", "M", "V")):
    return layer_records(step, value, layers=layers, metrics=metrics)


class Writer(Adapter):
    """Takes what is written instead of a logger, and is the clock: a picture takes so long."""

    def __init__(self, seconds=0.0):
        self.images, self.texts = [], []
        self.now, self.seconds = 0.0, seconds

    def clock(self):
        return self.now

    def write_image(self, tag, picture, step):
        self.images.append((tag, step))
        self.now += self.seconds

    def write_text(self, tag, markdown, step):
        self.texts.append(markdown)

    def at(self, kind):
        return [step for tag, step in self.images if tag.startswith(f"geometry.{kind}/")]


@pytest.fixture
def empty(monkeypatch):
    """Pictures are empty: one of each kind."""

    def draw(history, prefix, kinds, *_):
        return [(f"geometry.{kind}/x", (b"", 1, 1)) for kind in kinds]

    monkeypatch.setattr(live, "draw_pictures", draw)


@pytest.mark.slow
def test_tensorboard_gets_images_and_a_text_of_each_run(tmp_path):
    monitor = GeometryMonitor(every_n_steps=1, on_error="raise")
    for name, max_steps in (("first", 6), ("second", 2)):
        logger = TensorBoardLogger(tmp_path, name=name, version="")
        fit(tmp_path, monitor, max_steps=max_steps, logger=logger)
        if name == "first":
            metrics = {record["metric"] for record in monitor.history}
    found = events(tmp_path / "first")
    steps = {tag: [event.step for event in found.Images(tag)] for tag in found.Tags()["images"]}
    drawn = {tag.partition("/")[2] for tag in steps if tag.startswith("geometry.curves/")}
    assert {"M_over_Q", "anisotropy"} <= drawn <= {*headlines()}
    kinds = ("curves", "heatmap", "profile")
    assert steps.keys() == {
        *(f"geometry.{kind}/{metric}" for kind in kinds for metric in drawn),
        "geometry.shares/M, V_W, V_B",
    }
    for tag, at in steps.items():
        assert at in ([0, 6], [0]), tag  # within 3 s at the end
        image = Image.open(io.BytesIO(found.Images(tag)[-1].encoded_image_string))
        # twice what TensorBoard shows: it leaves out pixels, and blends none
        assert image.width == 700, tag
        assert len(np.unique(np.asarray(image.convert("RGB")).reshape(-1, 3), axis=0)) > 10
    (text,) = found.Tensors("geometry/what the numbers mean/text_summary")
    written = text.tensor_proto.string_val[0].decode()
    for metric in metrics:
        assert f"| {metric} |" in written
        assert known_terms()[metric].meaning in written
    second = events(tmp_path / "second").Images("geometry.curves/M_over_Q")
    assert [event.step for event in second] == [0, 2]


def test_without_pictures_and_with_other_loggers_the_rest_is_written(tmp_path):
    monitor = GeometryMonitor(2, metrics=moments, pictures=False, on_error="raise")
    loggers = [TensorBoardLogger(tmp_path, name="tb", version=""), CSVLogger(tmp_path)]
    fit(tmp_path, monitor, max_steps=3, logger=loggers)
    assert len({record["step"] for record in monitor.history}) == 3
    tags = events(tmp_path / "tb").Tags()
    assert not tags["images"]
    assert "geometry.V/mean" in tags["scalars"]
    assert {"custom_scalars__config__", "geometry/what the numbers mean/text_summary"} <= set(
        tags["tensors"]
    )


@pytest.mark.parametrize("late", [False, True])
def test_a_failure_in_drawing_turns_monitoring_off_and_training_goes_on(
    tmp_path, monkeypatch, late
):
    def broken(self, loggers, history, *, last=False):
        if last == late:
            raise ValueError("no room to draw")

    monkeypatch.setattr(Media, "write", broken)
    plain, _ = fit(tmp_path, max_steps=4)
    monitor = GeometryMonitor(every_n_steps=2, metrics=lambda dim: [EmbeddingMoments(dim)])
    with pytest.warns(UserWarning, match="GeometryMonitor is off .* ValueError: no room to draw"):
        module, run = fit(tmp_path, monitor, max_steps=4, logger=TensorBoardLogger(tmp_path))
    assert run.global_step == 4
    assert all(
        torch.equal(a, b) for a, b in zip(plain.parameters(), module.parameters(), strict=True)
    )


def test_only_rank_zero_draws(tmp_path, monkeypatch):
    monkeypatch.setattr(L.Trainer, "is_global_zero", property(lambda self: False))
    monitor = GeometryMonitor(every_n_steps=2, metrics=moments, on_error="raise")
    logger = TensorBoardLogger(tmp_path, name="tb", version="")
    fit(tmp_path, monitor, module=TinyLM(), max_steps=4, logger=logger)
    assert not [*tmp_path.rglob("events*")] or not events(tmp_path / "tb").Tags()["images"]


def measured(num_steps, pause, seconds):
    """What is drawn of a run with so long between measurements where a picture takes so long; its
    end comes next.

    Also the seconds that pictures had taken and that had gone by after each measurement.
    """
    writer, history, times = Writer(seconds), [], []
    pictures = Media("geometry", clock=writer.clock)
    for step in range(num_steps):
        history += records(step, layers=LAYERS[:1], metrics=["M"])
        pictures.write([writer], history)
        times.append((seconds * len(writer.images), writer.now))
        writer.now += pause
    return pictures, writer, history, times


@pytest.mark.usefixtures("empty")
@pytest.mark.parametrize(("count", "drawn"), [(1, [0]), (3, [0, 2]), (100, [0, 99])])
def test_pictures_of_a_short_run_are_drawn_at_its_first_measurement_and_at_its_last(count, drawn):
    pictures, writer, history, _ = measured(count, pause=0.1, seconds=0.2)
    pictures.write([writer], history, last=True)
    for kind in ("curves", "heatmap", "profile", "shares"):
        assert writer.at(kind) == drawn
    assert len(writer.texts) == 1
    pictures.write([writer], [], last=True)  # a history that was cleared


@pytest.mark.usefixtures("empty")
@pytest.mark.parametrize("pause", [0.5, 3, 20, 200])
@pytest.mark.parametrize("seconds", [0.05, 0.9])
def test_pictures_take_at_most_5_percent_of_the_time_of_a_run_so_far(pause, seconds):
    _, writer, _, times = measured(300, pause, seconds)
    assert all(spent <= max(4 * seconds, 0.05 * now) for spent, now in times)
    if 0.05 * times[-1][1] >= 16 * seconds:  # all of them, where there is time
        assert writer.at("profile")[-1] >= 75


@pytest.mark.usefixtures("empty")
@pytest.mark.parametrize(("seconds", "number"), [(0.2, 4), (1.0, 3), (2.9, 1), (7.0, 1)])
def test_the_last_pictures_take_at_most_3_seconds_where_one_does_not_take_more(seconds, number):
    pictures, writer, history, _ = measured(5, pause=1, seconds=seconds)
    before = len(writer.images)
    pictures.write([writer], history, last=True)
    assert len(writer.images) == before + number
    assert writer.at("curves") == [0, 4]


@pytest.mark.usefixtures("empty")
def test_what_a_long_run_draws_grows_with_the_logarithm_of_its_length():
    _, writer, _, _ = measured(1000, pause=60, seconds=0.25)
    drawn = np.array(writer.at("curves")) + 1
    assert 60 <= len(drawn) <= 120
    assert max(drawn[1:] - drawn[:-1] * 1.05) < 2


@pytest.mark.usefixtures("unpainted")
@pytest.mark.parametrize(
    ("history", "kinds"),
    [
        ([], ""),
        (records(5, 0.0, layers=["x" * 40]), "curves heatmap profile"),
        ([*records(0, -3.0), *records(9, np.inf, LAYERS[:1])], "curves heatmap profile"),
        (records(0, layers=["mean(last4)"]), ""),  # of no depth
        (records(0, metrics=["mine"]), ""),
        (
            [each for step in range(0, 150_000, 250) for each in records(step, layers=LAYERS[:1])],
            "curves heatmap profile",
        ),
    ],
    ids=["nothing", "equal", "infinite", "means", "own", "long"],
)
def test_whatever_was_measured_is_drawn_if_it_can_be(history, kinds):
    writer = Writer()
    pictures = Media("geometry", clock=lambda: 0.0)
    for last in (False, True):
        pictures.write([writer], history, last=last)
    drawn = {tag.partition("/")[0].removeprefix("geometry.") for tag, _ in writer.images}
    assert drawn - {"shares"} == {*kinds.split()}
    of_meanings = [text for text in writer.texts if text.startswith("| number |")]
    assert len(of_meanings) == bool(history)


@pytest.mark.usefixtures("empty")
def test_loggers_are_told_what_happened_from_two_measurements_on():
    writer, history = Writer(), []
    pictures = Media("geometry", clock=lambda: 0.0)
    for step in (0, 8):
        history += records(step, layers=["block.00", "block.01"], metrics=["M_over_Q"])
        pictures.write([writer], history, last=step == 8)
    meanings, told = writer.texts
    assert meanings.startswith("| number |")
    assert told.startswith("- M / Q: ")
    assert "at step 8" in told
