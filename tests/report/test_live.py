import io
from itertools import pairwise

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from embedgeo import EmbeddingMoments, GeometryMonitor
from embedgeo.glossary import headlines, known_terms
from embedgeo.report import figures, live
from embedgeo.report.figures import profile
from embedgeo.training.loggers import Adapter, Media
from tests.records import layer_records
from tests.training.runs import TinyLM, fit

LAYERS = ["embed", "block.00", "block.01", "final_norm"]


def events(folder):
    return EventAccumulator(
        str(folder), size_guidance={"images": 0, "scalars": 0, "tensors": 0}
    ).Reload()


def image_steps(folder):
    found = events(folder)
    return {tag: [event.step for event in found.Images(tag)] for tag in found.Tags()["images"]}


def records(step, value=1.0, layers=LAYERS, metrics=("mean_cosine", "M", "V")):
    return layer_records(step, value, layers=layers, metrics=metrics)


class Clock:
    """The time, for `Media`: goes on where it is told to."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def empty(monkeypatch):
    """Pictures are empty: one of each kind."""

    def draw(history, prefix, kinds, references):
        return [(f"geometry.{kind}/x", (b"", 1, 1)) for kind in kinds]

    monkeypatch.setattr(live, "draw_pictures", draw)


class Writer(Adapter):
    """Takes what is written instead of a logger; a picture takes so many seconds of a clock."""

    def __init__(self, clock=None, seconds=0.0):
        self.images, self.texts = [], []
        self.clock, self.seconds = clock or Clock(), seconds

    def write_image(self, tag, picture, step):
        self.images.append((tag, step, picture))
        self.clock.now += self.seconds

    def write_text(self, tag, markdown, step):
        self.texts.append((tag, markdown, step))

    def at(self, kind):
        return [step for tag, step, _ in self.images if tag.startswith(f"geometry.{kind}/")]


@pytest.mark.slow
def test_tensorboard_gets_images_and_a_text(tmp_path):
    monitor = GeometryMonitor(every_n_steps=1, on_error="raise")
    fit(tmp_path, monitor, max_steps=6, logger=TensorBoardLogger(tmp_path, name="tb", version=""))
    steps = image_steps(tmp_path / "tb")
    assert steps.keys() == {
        *(
            f"geometry.{kind}/{metric}"
            for metric in headlines()
            for kind in ("curves", "heatmap", "profile")
        ),
        "geometry.shares/M, V_W, V_B",
    }
    for tag, at in steps.items():
        assert at in ([0, 6], [0]), tag  # within 3 s at the end
    assert 6 in steps["geometry.curves/M_over_Q"]
    found = events(tmp_path / "tb")
    for tag in steps:
        image = Image.open(io.BytesIO(found.Images(tag)[-1].encoded_image_string))
        assert image.size == (found.Images(tag)[-1].width, found.Images(tag)[-1].height)
        # twice what TensorBoard shows: it leaves out pixels, and blends none
        assert image.width == 700, tag
        assert len(np.unique(np.asarray(image.convert("RGB")).reshape(-1, 3), axis=0)) > 10
    (text,) = found.Tensors("geometry/what the numbers mean/text_summary")
    written = text.tensor_proto.string_val[0].decode()
    for metric in {record["metric"] for record in monitor.history}:
        assert f"| {metric} |" in written
        assert known_terms()[metric].meaning in written


@pytest.mark.slow
def test_the_images_of_a_run_are_of_that_run_only(tmp_path):
    monitor = GeometryMonitor(
        every_n_steps=1, metrics=lambda dim: [EmbeddingMoments(dim)], on_error="raise"
    )
    for name, max_steps in (("first", 5), ("second", 2)):
        fit(
            tmp_path,
            monitor,
            max_steps=max_steps,
            logger=TensorBoardLogger(tmp_path, name=name, version=""),
        )
    steps = image_steps(tmp_path / "second")
    assert steps["geometry.curves/M_over_Q"] == [0, 2]


def test_other_loggers_get_no_images(tmp_path):
    monitor = GeometryMonitor(
        every_n_steps=2, metrics=lambda dim: [EmbeddingMoments(dim)], on_error="raise"
    )
    fit(tmp_path, monitor, max_steps=3, logger=CSVLogger(tmp_path))
    assert len({record["step"] for record in monitor.history}) == 3


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
    given = []
    monkeypatch.setattr(
        Media, "write", lambda self, loggers, *args, **kwargs: given.extend(loggers)
    )
    monkeypatch.setattr(L.Trainer, "is_global_zero", property(lambda self: False))
    monitor = GeometryMonitor(
        every_n_steps=2, metrics=lambda dim: [EmbeddingMoments(dim)], on_error="raise"
    )
    fit(tmp_path, monitor, module=TinyLM(), max_steps=4, logger=TensorBoardLogger(tmp_path))
    assert not given


def measured(num_steps, pause, seconds):
    """What is drawn of a run with so long between measurements where a picture takes so long; its
    end comes next.

    Also the seconds that pictures had taken and that had gone by after each measurement.
    """
    clock = Clock()
    pictures, writer, history = Media("geometry", clock=clock), Writer(clock, seconds), []
    times = []
    for step in range(num_steps):
        history += records(step, layers=LAYERS[:1], metrics=["M"])
        pictures.write([writer], history)
        times.append((seconds * len(writer.images), clock.now))
        clock.now += pause
    return pictures, writer, history, times


@pytest.mark.usefixtures("empty")
@pytest.mark.parametrize(("count", "drawn"), [(1, [0]), (3, [0, 2]), (100, [0, 99])])
def test_pictures_of_a_short_run_are_drawn_at_its_first_measurement_and_at_its_last(count, drawn):
    pictures, writer, history, _ = measured(count, pause=0.1, seconds=0.2)
    pictures.write([writer], history, last=True)
    assert (
        writer.at("curves")
        == writer.at("heatmap")
        == writer.at("profile")
        == writer.at("shares")
        == drawn
    )
    assert len(writer.texts) == 1


@pytest.mark.usefixtures("empty")
@pytest.mark.parametrize("pause", [0.5, 3, 20, 200])
@pytest.mark.parametrize("seconds", [0.05, 0.9])
def test_pictures_take_at_most_5_percent_of_the_time_of_a_run_so_far(pause, seconds):
    _, writer, _, times = measured(300, pause, seconds)
    first = 4 * seconds
    assert all(spent <= max(first, 0.05 * now) for spent, now in times)
    if 0.05 * times[-1][1] >= 4 * first:  # all of them, where there is time
        assert writer.at("profile")[-1] >= 75
    if 0.05 * pause >= 2 * first:
        assert writer.at("profile") == [0, 1, 3, 7, 15, 31, 63, 127, 255]


@pytest.mark.usefixtures("empty")
def test_of_the_last_measurement_only_what_has_not_been_drawn_is_drawn_at_the_end():
    pictures, writer, history, _ = measured(20, pause=200, seconds=0.25)
    assert writer.at("curves") == writer.at("heatmap") == list(range(20))
    assert writer.at("profile") == writer.at("shares") == [0, 1, 3, 7, 15]
    pictures.write([writer], history, last=True)
    assert writer.at("curves") == writer.at("heatmap") == list(range(20))
    assert writer.at("profile") == writer.at("shares") == [0, 1, 3, 7, 15, 19]
    pictures.write([writer], [], last=True)  # a history that was cleared


@pytest.mark.usefixtures("empty")
@pytest.mark.parametrize(("seconds", "number"), [(0.2, 4), (1.0, 3), (1.1, 2), (2.9, 1), (7.0, 1)])
def test_the_last_pictures_take_at_most_3_seconds_where_one_does_not_take_more(seconds, number):
    pictures, writer, history, _ = measured(5, pause=1, seconds=seconds)
    assert len(writer.images) == 4
    pictures.write([writer], history, last=True)
    assert len(writer.images) == 4 + number
    assert writer.at("curves") == [0, 4]


def test_without_pictures_the_rest_is_written(tmp_path):
    writer = Writer()
    Media("geometry", pictures=False).write([writer], records(0))
    assert (writer.images, len(writer.texts)) == ([], 1)
    monitor = GeometryMonitor(
        2, metrics=lambda dim: [EmbeddingMoments(dim)], pictures=False, on_error="raise"
    )
    fit(tmp_path, monitor, max_steps=3, logger=TensorBoardLogger(tmp_path, name="tb", version=""))
    tags = events(tmp_path / "tb").Tags()
    assert not tags["images"]
    assert "geometry.V/mean" in tags["scalars"]
    assert {"custom_scalars__config__", "geometry/what the numbers mean/text_summary"} <= set(
        tags["tensors"]
    )


@pytest.mark.usefixtures("empty")
def test_what_a_long_run_draws_grows_with_the_logarithm_of_its_length():
    _, writer, _, _ = measured(1000, pause=60, seconds=0.25)
    drawn = np.array(writer.at("curves")) + 1
    assert 60 <= len(drawn) <= 120
    assert max(drawn[1:] - drawn[:-1] * 1.05) < 2


def test_the_history_before_a_resume_is_drawn_too(monkeypatch):
    steps = []
    monkeypatch.setattr(
        figures, "profile", lambda run, metric: steps.append(run.steps) or profile(run, metric)
    )
    clock = Clock()
    pictures, writer = Media("geometry", clock=clock), Writer(clock)
    history = [*records(0), *records(10), *records(20)]
    pictures.write([writer], history)
    pictures.write([writer], [*history, *records(25)])
    assert steps == [[0, 10, 20], [0, 10, 20, 25]]
    assert writer.at("heatmap") == [20, 25]


def test_without_measurements_nothing_is_drawn():
    pictures, writer = Media("geometry"), Writer()
    pictures.write([writer], [])
    pictures.write([writer], [], last=True)
    assert not writer.images
    assert not writer.texts


@pytest.mark.usefixtures("unpainted")
def test_the_steps_drawn_are_bounded_and_span_all_steps(monkeypatch):
    runs = []
    monkeypatch.setattr(
        figures, "profile", lambda run, metric: runs.append(run) or profile(run, metric)
    )

    def steps_drawn(steps):
        history = [
            record
            for step in steps
            for record in records(step, layers=LAYERS[:2], metrics=("mean_cosine",))
        ]
        assert len([*live.draw_pictures(history, "geometry", ["profile"])]) == 1
        return runs[-1].steps

    steps = [*range(0, 100), *range(100, 300_000, 250)]
    drawn = steps_drawn(steps)
    assert 256 <= len(drawn) <= 512
    assert set(drawn) <= set(steps)
    assert drawn[:5] == [0, 1, 2, 3, 4]
    assert drawn[-1] == steps[-1]
    assert max(b / a for a, b in pairwise(drawn) if a >= 2000) < 1.2
    assert steps_drawn(steps[:512]) == steps[:512]
    assert steps_drawn([7]) == [7]
    gaps = np.diff(steps_drawn(range(0, 100_000, 100)))
    assert set(gaps) == {100, 200}  # steps that are evenly spaced stay so


@pytest.mark.parametrize("value", [0.0, -3.0])
def test_equal_values_at_a_single_step_can_be_drawn(value):
    writer = Writer()
    Media("geometry").write([writer], records(5, value, layers=["x" * 40]))
    assert writer.at("curves") == writer.at("heatmap") == writer.at("profile") == [5]


@pytest.mark.slow
def test_the_figures_are_the_reports_of_what_was_measured(monkeypatch):
    drawn = []
    monkeypatch.setattr(
        figures, "profile", lambda run, metric: drawn.append(run) or profile(run, metric)
    )
    pictures, writer = Media("geometry", clock=lambda: 0.0), Writer()  # however long it takes
    history = [*records(0, 2.0), *records(10, 3.0), *records(10, np.inf, LAYERS[:1])]
    pictures.write([writer], [*history, *records(20, 4.0, [*LAYERS, "late"])[-3:]], last=True)
    run = drawn[0]
    assert run.steps == [0, 10, 20]
    assert run.layers == [*LAYERS, "late"]
    nan = np.nan
    np.testing.assert_array_equal(
        run.table("M"), [[2, 2, 2, 2, nan], [nan, 3, 3, 3, nan], [nan, nan, nan, nan, 4]]
    )
    assert set(run.metrics) == {"mean_cosine", "M", "V"}


def test_means_over_layers_have_no_depth_to_be_drawn_over():
    writer = Writer()
    Media("geometry").write([writer], records(0, layers=["mean(last4)"]), last=True)
    assert not writer.images
    assert len(writer.texts) == 1


def test_metrics_of_the_users_own_are_explained_once_and_not_drawn():
    pictures, writer, history = Media("geometry"), Writer(), []
    for step in range(3):
        history += records(step, metrics=["mine"])
        pictures.write([writer], history)
    assert not writer.images
    assert len(writer.texts) == 1
    pictures.write([writer], [*history, *records(3)], last=True)
    assert writer.at("heatmap") == [3]
